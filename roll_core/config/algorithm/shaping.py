"""Config of reward shaping, masks and sample weights, which apply around the advantages in every algorithm."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import Section, Unit


class StatisticsFrom(StrEnum):
    """Rewards whose mean is subtracted from a reward, or whose standard deviation divides it."""

    NONE = "none"
    """No rewards: nothing is subtracted or divided."""
    GROUP = "group"
    """Rewards of the same problem."""
    DOMAIN = "domain"
    """Rewards of the same domain in the batch."""
    BATCH = "batch"
    """All rewards of the batch."""
    RUNNING = "running"
    """Rewards of the same domain over the whole run so far."""


class KlEstimator(StrEnum):
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1, absolute = |d|, with d = log(policy / reference) of the sampled token;
    full = the exact sum over the vocabulary, which runs the reference beside the policy."""

    K1 = "k1"
    """Unbiased; high variance, may be negative."""
    K2 = "k2"
    """Biased; low variance, never negative."""
    K3 = "k3"
    """Unbiased; low variance, never negative."""
    ABSOLUTE = "absolute"
    """Biased; never negative."""
    FULL = "full"
    """Exact; runs the reference beside the policy."""


class NormalizeConfig(Section):
    """reward := (reward - mean) / (std + 1e-6)."""

    mean: StatisticsFrom = StatisticsFrom.GROUP
    std: StatisticsFrom = StatisticsFrom.GROUP
    """Unbiased. `running` is over the whole run so far, per domain, and part of the checkpoint."""


class OverlongConfig(Section):
    """DAPO's soft punishment of long completions (arXiv 2503.14476): from 0 down to -weight over the last tokens allowed."""

    buffer_tokens: PositiveInt | None = None
    """How many tokens before rollout.max_new_tokens the penalty begins; null takes a fifth of it (DAPO: 4096 of 20480)."""
    weight: PositiveFloat = 1.0
    """Penalty of a completion that reaches the limit."""


class AdaptiveKlConfig(Section):
    """Moves the coefficient so that the KL stays near a target (Ziegler et al., arXiv 1909.08593)."""

    target: Annotated[PositiveFloat, Unit("nats")] = 6.0
    """KL per trajectory to aim at, in nats (Ziegler: 6)."""
    horizon: Annotated[PositiveFloat, Unit("trajectories")] = 10000.0
    """Trajectories over which the coefficient may change by `max_error` of itself (Ziegler: 10000)."""
    max_error: PositiveFloat = 0.2
    """A KL further from its target than this share counts as this far (Ziegler: 0.2)."""


class KlRewardConfig(Section):
    """Charge every token for its distance from the reference: reward := reward - coefficient * KL(anchor || reference)."""

    coefficient: PositiveFloat = 0.001
    """Weight of the penalty; where it begins, with `adaptive`."""
    estimator: KlEstimator = KlEstimator.K1
    token_reward_clip: PositiveFloat | None = None
    """What a token is charged is kept within this; null: whatever it is."""
    adaptive: AdaptiveKlConfig | None = None
    """Null keeps the coefficient as it is."""


class MasksConfig(Section):
    """Trajectories that are generated and graded, count in baselines and statistics, but are not trained on."""

    truncated: bool = False
    """Leave out completions that were cut off at rollout.max_new_tokens (DAPO's overlong filtering)."""
    min_accuracy: float | None = Field(default=None, ge=0.0, le=1.0)
    """Leave out groups whose share of right answers is this or less (0: never right)."""
    max_accuracy: float | None = Field(default=None, ge=0.0, le=1.0)
    """Leave out groups whose share of right answers is this or more (1: always right)."""
    wrong_above_tokens: PositiveInt | None = None
    """Leave out wrong answers longer than this."""

    @model_validator(mode="after")
    def _check_min_below_max_accuracy(self):
        low, high = self.min_accuracy, self.max_accuracy
        if low is not None and high is not None and low >= high:
            raise ValueError(f"min_accuracy ({low}) must be below max_accuracy ({high}): no group would be left")
        return self


class WeightRange(Section):
    """Weight that changes linearly from the first to the last end of a range; all weights are rescaled to a mean of 1."""

    first: NonNegativeFloat
    """Weight at the first end of the range."""
    last: NonNegativeFloat
    """Weight at the last end of the range."""

    @model_validator(mode="after")
    def _check_some_weight_is_positive(self):
        if self.first == self.last == 0:
            raise ValueError("first and last cannot both be 0: nothing would be trained on")
        return self


class SampleWeightsConfig(Section):
    """How much a trajectory counts in the policy's objective."""

    difficulty: WeightRange | None = None
    """From groups that are always right (first) to those never right (last); {first: 0.5, last: 2} favours hard problems."""
    length: WeightRange | None = None
    """From the shortest completion (first) to the longest (last); {first: 1.5, last: 0.5} favours brevity."""


class ShapingConfig(Section):
    """In this order: overlong, (normalize,) reward_clip, kl; then advantages are computed; then masks and weights apply."""

    reward_clip: PositiveFloat | None = None
    """Rewards are kept within plus and minus this."""
    overlong: OverlongConfig | None = None
    kl: KlRewardConfig | None = None
    """KL in the reward; needs anchor and reference logprobs."""
    masks: MasksConfig = MasksConfig()
    weights: SampleWeightsConfig = SampleWeightsConfig()


class NormalizingConfig(ShapingConfig):
    """Shaping for algorithms without a baseline of their own: rewards can also be normalised."""

    normalize: NormalizeConfig | None = None
    """Normalisation of rewards, after the overlong penalty and before the clip; null keeps rewards as they are."""
