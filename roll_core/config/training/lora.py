"""Config of LoRA: which matrices of a model are adapted by a trained low-rank product."""

from enum import StrEnum

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from roll_core.config.base import Section


class LoraTarget(StrEnum):
    """Linear layers of each decoder layer, by their names in Llama and Qwen3."""

    QUERY = "q_proj"
    """Query projection of the attention."""
    KEY = "k_proj"
    """Key projection of the attention."""
    VALUE = "v_proj"
    """Value projection of the attention."""
    OUTPUT = "o_proj"
    """Output projection of the attention."""
    GATE = "gate_proj"
    """Gate projection of the MLP."""
    UP = "up_proj"
    """Up projection of the MLP."""
    DOWN = "down_proj"
    """Down projection of the MLP."""


ATTENTION_TARGETS = frozenset({LoraTarget.QUERY, LoraTarget.KEY, LoraTarget.VALUE, LoraTarget.OUTPUT})
"""Targets that every model has; a mixture's experts have no linear layers of their own."""


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al., arXiv 2106.09685): the model's weights are frozen, and a trained product of two small
    matrices is added to each target matrix. Engines, exports and checks see the sums, like a model without LoRA. Experts of
    a mixture are not linear layers and stay frozen."""

    rank: PositiveInt = 16
    """Inner dimension of the product; higher learns more and costs more memory."""
    alpha: PositiveFloat = 32.0
    """Scale of the product, which is multiplied by alpha / rank."""
    targets: tuple[LoraTarget, ...] = Field(default=tuple(LoraTarget), min_length=1)
    """Linear layers to adapt, each named once. In a mixture only those of the attention have an effect."""

    @field_validator("targets")
    @classmethod
    def _check_targets_are_unique(cls, targets: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
        if len(set(targets)) < len(targets):
            raise ValueError("name each layer once")
        return targets
