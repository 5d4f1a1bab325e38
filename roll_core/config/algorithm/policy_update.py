"""Config that all algorithms share: signals, shaping, corrections, penalties, aggregation. `methods.py` has the variants."""

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from roll_core.config.algorithm.correction import CorrectionConfig, CorrectionLevel, WeightingConfig
from roll_core.config.algorithm.critic import CriticConfig
from roll_core.config.algorithm.shaping import KlEstimator, NormalizingConfig, ShapingConfig, StatisticsFrom
from roll_core.config.base import Section


class Aggregation(StrEnum):
    """Reduction of token losses to one number, always over the whole batch of an optimizer step."""

    TOKEN_MEAN = "token_mean"
    """Mean over all tokens of the batch."""
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    """Mean over each sequence's tokens, then mean over sequences."""
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    """Sum over each sequence's tokens, then mean over sequences."""
    FIXED_LENGTH = "fixed_length"
    """Sum over each sequence's tokens divided by one fixed length, then mean over sequences."""


class RatioLevel(StrEnum):
    """Span of tokens that share one policy ratio."""

    TOKEN = "token"
    """Each token has its own ratio."""
    TURN = "turn"
    """Tokens of a turn share one ratio."""
    SEQUENCE = "sequence"
    """Tokens of a sequence share one ratio."""


class Signal(StrEnum):
    """Quantities per token that an algorithm can declare; only declared ones are computed before the update."""

    ANCHOR = "anchor"
    """Logprobs of the trainer before its first update of the iteration."""
    REFERENCE = "reference"
    """Logprobs of the frozen reference policy."""
    DIVERGENCE = "divergence"
    """KL divergence from the reference over the full vocabulary."""
    TEACHER = "teacher"
    """Logprobs of the teachers."""
    VALUES = "values"
    """Values of the critic."""


class KlLossConfig(Section):
    """+ coefficient * KL(policy || reference) in the loss; the reference is the policy the run began with."""

    coefficient: PositiveFloat = 0.001
    """0.04 in GRPO's paper, 0.001 and less in later practice."""
    estimator: KlEstimator = KlEstimator.K3
    """k2, k3, absolute or full: as a loss, k1 has an expected gradient of zero and is refused."""

    @model_validator(mode="after")
    def _check_estimator_has_a_gradient(self):
        if self.estimator is KlEstimator.K1:
            raise ValueError(
                "estimator k1 has an expected gradient of zero as a loss: set kl_loss.estimator=k3 (or k2), or charge k1 in "
                "the reward with shaping.kl"
            )
        return self


class PolicyUpdate(Section):
    """Settings that every algorithm has."""

    uses_anchor: ClassVar[bool] = True
    """True if the objective has a ratio to the anchor."""
    own_signals: ClassVar[frozenset[Signal]] = frozenset()
    """Signals that the method's advantages always need, whatever its settings."""
    samples_greedily: ClassVar[bool] = False
    """True if each problem also gets one greedy attempt, as a baseline."""

    shaping: ShapingConfig = ShapingConfig()
    """What happens to rewards and trajectories before advantages, and which of them are trained on."""
    domains: Mapping[str, ShapingConfig] = {}
    """Shaping for the problems of a domain, instead of `shaping`."""
    whiten_advantages: bool = False
    """Standardise advantages over all tokens of the batch."""
    advantage_clip: PositiveFloat | None = None
    """Advantages are kept within plus and minus this."""
    correction: CorrectionConfig | None = None
    """For samplers that differ from the trainer, by arithmetic or by age."""
    kl_loss: KlLossConfig | None = None
    """Null: no penalty, and no reference policy is loaded."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""
    fixed_length_tokens: PositiveInt | None = None
    """What `aggregation: fixed_length` divides by; null takes rollout.max_new_tokens."""

    @model_validator(mode="after")
    def _check_fixed_length_tokens_are_used(self):
        if self.fixed_length_tokens is not None and self.aggregation is not Aggregation.FIXED_LENGTH:
            raise ValueError(
                f"fixed_length_tokens ({self.fixed_length_tokens}) needs aggregation fixed_length, not {self.aggregation}"
            )
        return self

    @property
    def compares_groups(self) -> bool:
        """True if a trajectory's advantage depends on the others of its group."""
        return True

    @property
    def shaping_sections(self) -> dict[str, ShapingConfig]:
        """Every shaping section by its dotted key: `algorithm.shaping` and those of the domains."""
        return {"algorithm.shaping": self.shaping} | {f"algorithm.domains.{k}": v for k, v in self.domains.items()}

    @property
    def charges_tokens(self) -> bool:
        """True if tokens are charged for their KL in the reward, so that advantages differ by token."""
        return any(section.kl is not None for section in self.shaping_sections.values())

    @property
    def value_model(self) -> CriticConfig | None:
        """Config of the critic, which is updated once more in every iteration; None for methods without one."""
        return None

    @property
    def has_critic(self) -> bool:
        """True if the method trains a critic."""
        return self.value_model is not None

    @property
    def warmup_iterations(self) -> int:
        """Iterations at the start that update only the critic."""
        return 0 if self.value_model is None else self.value_model.warmup_iterations

    @property
    def has_correction(self) -> bool:
        """True if tokens are already weighted by an importance ratio to their sampler."""
        return self.correction is not None

    @property
    def correction_level(self) -> CorrectionLevel:
        """Span of tokens that share a weight in the correction that is added for a mismatch."""
        return CorrectionLevel.TOKEN

    @property
    def with_correction(self) -> Self:
        """Config with truncated importance sampling at `correction_level`; unchanged if it has a correction already."""
        added = CorrectionConfig(weighting=WeightingConfig(level=self.correction_level))
        return self if self.has_correction else self.model_copy(update={"correction": added})

    @property
    def credit_signals(self) -> frozenset[Signal]:
        """Signals that the advantages need, in addition to rewards."""
        penalties = [section.kl for section in self.shaping_sections.values() if section.kl is not None]
        signals = set(self.own_signals)
        for penalty in penalties:
            full = penalty.estimator is KlEstimator.FULL
            signals |= {Signal.DIVERGENCE} if full else {Signal.ANCHOR, Signal.REFERENCE}
        return frozenset(signals)

    def loss_signals(self, num_optimizer_steps: int) -> frozenset[Signal]:
        """Signals that the loss needs, computed before the first optimizer step. With a single step the anchor (the policy
        before the update) is the policy itself, and is not among them."""
        signals = set()
        if num_optimizer_steps > 1 and (self.uses_anchor or self.correction is not None):
            signals.add(Signal.ANCHOR)
        if self.kl_loss is not None and self.kl_loss.estimator is not KlEstimator.FULL:
            signals.add(Signal.REFERENCE)
        return frozenset(signals)

    @property
    def needs_reference(self) -> bool:
        """True if a frozen reference policy must be loaded."""
        return self.kl_loss is not None or self.charges_tokens


class NormalizingUpdate(PolicyUpdate):
    """Settings of algorithms without a baseline of their own: rewards can be normalised."""

    shaping: NormalizingConfig = NormalizingConfig()
    """As in every algorithm, and with `normalize`."""
    domains: Mapping[str, NormalizingConfig] = {}
    """Shaping for the problems of a domain, instead of `shaping`."""

    @property
    def compares_groups(self) -> bool:
        normalized = [s.normalize for s in (self.shaping, *self.domains.values()) if s.normalize is not None]
        return any(StatisticsFrom.GROUP in (normalize.mean, normalize.std) for normalize in normalized)


class ClippedUpdate(PolicyUpdate):
    """Settings of every algorithm with PPO's clipped ratio."""

    clip_low: PositiveFloat = 0.2
    """The policy ratio is clipped below at 1 - clip_low (PPO's 0.2)."""
    clip_high: PositiveFloat = 0.2
    """The policy ratio is clipped above at 1 + clip_high (PPO's 0.2)."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """For negative advantages the loss is at most minus this times the advantage (3 in arXiv 1912.09729); null: no bound."""

    @model_validator(mode="after")
    def _check_clip_low_below_one(self):
        if self.clip_low >= 1:
            raise ValueError(f"clip_low ({self.clip_low}) must be below 1: the ratio is clipped at 1 - clip_low")
        return self
