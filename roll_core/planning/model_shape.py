"""The sizes of a model, and how many weights that makes: all that planning needs to know of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_core.config.model import Architecture, ModelConfig, PretrainedModel, ScratchModel
from roll_core.models.characters import VOCABULARY


@dataclass(frozen=True)
class ModelShape:
    """Example: ModelShape(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_size=128,
    vocabulary=151936, is_tied=True, has_head_norms=True), which is Qwen3-0.6B"""

    hidden: int
    intermediate: int
    """Of a layer, or of one of its experts."""
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool
    """Whether the output layer is the embedding."""
    has_head_norms: bool
    """Whether queries and keys are normalised, head by head."""
    experts: int = 0
    """In each layer; none in a dense model."""
    experts_per_token: int = 1

    @property
    def num_parameters(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size
        matrices = 3 * self.hidden * self.intermediate * max(1, self.experts) + self.hidden * self.experts
        norms = 2 * self.hidden + (2 * self.head_size if self.has_head_norms else 0)
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return self.layers * (attention + matrices + norms) + embeddings + self.hidden


def shape_of(model: ModelConfig) -> ModelShape | None:
    """None for a model that is not on this machine."""
    match model:
        case ScratchModel():
            is_mixture = model.architecture is Architecture.QWEN3_MOE
            return ModelShape(
                hidden=model.hidden_size,
                intermediate=model.intermediate_size,
                layers=model.num_layers,
                heads=model.num_heads,
                kv_heads=model.num_kv_heads,
                head_size=model.hidden_size // model.num_heads,
                vocabulary=len(VOCABULARY),
                is_tied=True,
                has_head_norms=model.architecture is not Architecture.LLAMA,
                experts=model.num_experts if is_mixture else 0,
                experts_per_token=model.experts_per_token if is_mixture else 1,
            )
        case PretrainedModel():
            described = Path(model.path) / "config.json"
            return _read(json.loads(described.read_text())) if described.is_file() else None


def _read(described: dict[str, Any]) -> ModelShape:
    """What Hugging Face says of a model of the Llama or Qwen3 kind."""
    hidden, heads, experts = described["hidden_size"], described["num_attention_heads"], described.get("num_experts", 0)
    return ModelShape(
        hidden=hidden,
        intermediate=described["moe_intermediate_size" if experts else "intermediate_size"],
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=described.get("num_key_value_heads", heads),
        head_size=described.get("head_dim") or hidden // heads,
        vocabulary=described["vocab_size"],
        is_tied=described.get("tie_word_embeddings", False),
        has_head_norms=described.get("model_type", "").startswith("qwen3"),
        experts=experts,
        experts_per_token=described.get("num_experts_per_tok", 1) if experts else 1,
    )
