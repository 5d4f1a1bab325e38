"""Config of the policy: built from scratch (small, for a laptop and for tests) or read from a Hugging Face folder."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from roll_core.config.base import PathText, Section, Unit


class Architecture(StrEnum):
    """Architecture of a model that is built from scratch."""

    QWEN3 = "qwen3"
    """Dense decoder that normalises queries and keys."""
    QWEN3_MOE = "qwen3_moe"
    """Qwen3 with a mixture of experts in every layer."""
    LLAMA = "llama"
    """Dense decoder that does not normalise queries and keys."""


class ScratchModel(Section):
    """Randomly initialised model with a character tokenizer, both built in code: nothing is downloaded."""

    kind: Literal["scratch"] = "scratch"
    architecture: Architecture = Architecture.QWEN3
    """Architecture of the model."""
    hidden_size: PositiveInt = 64
    """Width of the residual stream; a multiple of num_heads."""
    intermediate_size: PositiveInt = 192
    """Inner width of each MLP, or of each expert."""
    num_layers: PositiveInt = 2
    """Number of decoder layers."""
    num_heads: PositiveInt = 4
    """Query heads of each attention layer."""
    num_kv_heads: PositiveInt = 2
    """Key-value heads of each attention layer; must divide num_heads. Fewer than num_heads is grouped-query attention."""
    num_experts: PositiveInt = 8
    """Experts in each layer, each with intermediate_size. Only with `model.architecture: qwen3_moe`."""
    experts_per_token: PositiveInt = 2
    """Experts that process each token; at most num_experts. Only with `model.architecture: qwen3_moe`."""
    max_positions: Annotated[PositiveInt, Unit("tokens")] = 256
    """Longest sequence, in tokens, prompt and completion together. At most training.micro_batch_tokens."""
    init_std: float = 0.06
    """Standard deviation of the initial weights. Large models use 0.02; small ones learn faster with more."""

    @model_validator(mode="after")
    def _check_heads_and_experts(self):
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of num_heads ({self.num_heads})")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) must be at most num_experts ({self.num_experts})"
            )
        return self


class ModelShape(Section):
    """Sizes of a Llama or Qwen3 model, enough for planning.

    Example: ModelShape(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_size=128, vocabulary=151936,
    is_tied=True), which is Qwen3-0.6B
    """

    hidden: PositiveInt
    """Width of the residual stream: `hidden_size` in config.json."""
    intermediate: PositiveInt
    """Inner width of each MLP, or of each expert: `intermediate_size` or `moe_intermediate_size` in config.json."""
    layers: PositiveInt
    """Number of decoder layers: `num_hidden_layers` in config.json."""
    heads: PositiveInt
    """Query heads of each attention layer: `num_attention_heads` in config.json."""
    kv_heads: PositiveInt
    """Key-value heads of each attention layer: `num_key_value_heads` in config.json."""
    head_size: PositiveInt
    """Width of one attention head: `head_dim` in config.json."""
    vocabulary: Annotated[PositiveInt, Unit("tokens")]
    """Size of the vocabulary, in tokens: `vocab_size` in config.json."""
    is_tied: bool = False
    """True if the output layer shares the embedding matrix: `tie_word_embeddings` in config.json."""
    has_head_norms: bool = True
    """True if queries and keys are normalised head by head, as in Qwen3; false for Llama."""
    experts: NonNegativeInt = 0
    """Experts in each layer; 0 is a dense model."""
    experts_per_token: PositiveInt = 1
    """Experts that process each token; 1 in a dense model."""


class PretrainedModel(Section):
    """Hugging Face causal language model in a local folder (config.json, safetensors, tokenizer)."""

    kind: Literal["pretrained"] = "pretrained"
    path: PathText
    """Folder that holds the model; it must exist on every node. A relative path starts at the working directory."""
    max_positions: Annotated[PositiveInt, Unit("tokens")] = 4096
    """Longest sequence to train or generate, in tokens; at most the model's context length. Lower it to save memory."""
    shape: ModelShape | None = None
    """Sizes of the model, for planning on a machine without the folder. Null reads them from config.json in the folder; if
    both exist, they must be equal."""


ModelConfig = Annotated[ScratchModel | PretrainedModel, Field(discriminator="kind")]
