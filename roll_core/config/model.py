"""The policy: built from scratch (small, for a laptop and for tests) or read from a Hugging Face folder."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from roll_core.config.base import Section


class Architecture(StrEnum):
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    LLAMA = "llama"


class ScratchModel(Section):
    """A randomly initialised model with a character tokenizer, both built in code: nothing is downloaded."""

    kind: Literal["scratch"] = "scratch"
    architecture: Architecture = Architecture.QWEN3
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 192
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    num_experts: PositiveInt = 8
    """Of qwen3_moe, in each layer, each with intermediate_size."""
    experts_per_token: PositiveInt = 2
    max_positions: PositiveInt = 256
    """Longest sequence, in tokens, prompt and completion together."""
    init_std: float = 0.06
    """Standard deviation of the initial weights; 0.02 is customary for large models, small ones learn faster with more."""

    @model_validator(mode="after")
    def _heads_divide(self):
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
    """The sizes of a model of the Llama or Qwen3 kind. Example: ModelShape(hidden=1024, intermediate=3072, layers=28,
    heads=16, kv_heads=8, head_size=128, vocabulary=151936, is_tied=True), which is Qwen3-0.6B"""

    hidden: PositiveInt
    intermediate: PositiveInt
    """Of a layer, or of one of its experts."""
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_size: PositiveInt
    vocabulary: PositiveInt
    is_tied: bool = False
    """Whether the output layer is the embedding."""
    has_head_norms: bool = True
    """Whether queries and keys are normalised, head by head."""
    experts: NonNegativeInt = 0
    """In each layer; none in a dense model."""
    experts_per_token: PositiveInt = 1


class PretrainedModel(Section):
    """A Hugging Face causal language model in a local folder (config.json, safetensors, tokenizer)."""

    kind: Literal["pretrained"] = "pretrained"
    path: str
    """Folder that holds the model; it must exist on every node."""
    max_positions: PositiveInt = 4096
    """Longest sequence to train or generate, in tokens; at most what the model was built for."""
    shape: ModelShape | None = None
    """What config.json in the folder says, for planning where the folder is not; where it is, the two must agree."""


ModelConfig = Annotated[ScratchModel | PretrainedModel, Field(discriminator="kind")]
