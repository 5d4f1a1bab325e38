"""Which matrices of a model learn by a small product that is added to them."""

from enum import StrEnum

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from roll_core.config.base import Section


class LoraTarget(StrEnum):
    """Linear layers, by the names that Llama and Qwen3 give them."""

    QUERY = "q_proj"
    KEY = "k_proj"
    VALUE = "v_proj"
    OUTPUT = "o_proj"
    GATE = "gate_proj"
    UP = "up_proj"
    DOWN = "down_proj"


IN_ATTENTION = frozenset({LoraTarget.QUERY, LoraTarget.KEY, LoraTarget.VALUE, LoraTarget.OUTPUT})


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al., arXiv 2106.09685): the model stays as it is, and to each matrix that is a target the
    product of two small ones is added, which alone learn. Engines, exports and checks get the sums: to them it is a model
    like any other. Experts of a mixture are no linear layers, and are left as they are."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The product is multiplied by alpha / rank."""
    targets: tuple[LoraTarget, ...] = Field(default=tuple(LoraTarget), min_length=1)

    @field_validator("targets")
    @classmethod
    def _each_once(cls, targets: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
        if len(set(targets)) < len(targets):
            raise ValueError("name each layer once")
        return targets
