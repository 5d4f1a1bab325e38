"""Algorithms, one variant each, with the knobs of that method only. `roll_core.algorithms.catalog` composes them."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from roll_core.config.base import Section


class Aggregation(StrEnum):
    """How token losses become one number, always over the whole batch of an optimizer step."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"


class Grpo(Section):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    clip_low: PositiveFloat = 0.2
    """The policy ratio is clipped below at 1 - clip_low (PPO's 0.2)."""
    clip_high: PositiveFloat = 0.28
    """The policy ratio is clipped above at 1 + clip_high (DAPO's clip-higher, arXiv 2503.14476)."""
    scale_by_std: bool = True
    """Divide group-relative rewards by their standard deviation in the group."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the k3 estimate of KL(policy || reference) in the loss; above 0 the reference policy is loaded."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN

    @model_validator(mode="after")
    def _clip_low_below_one(self):
        if self.clip_low >= 1:
            raise ValueError(f"clip_low ({self.clip_low}) must be below 1: the ratio is clipped at 1 - clip_low")
        return self


AlgorithmConfig = Annotated[Grpo, Field()]
"""A union discriminated by `kind` once there are two."""
