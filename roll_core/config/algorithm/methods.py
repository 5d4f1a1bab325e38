"""Config of each algorithm: one variant per method, with that method's settings only.

A default is the paper's value if the paper has one. `policy_update.py` has the settings that all methods share;
`roll_core.algorithms.catalog` builds the losses from these configs.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from roll_core.config.algorithm.correction import CorrectionConfig, CorrectionLevel, WeightingConfig
from roll_core.config.algorithm.critic import CriticConfig
from roll_core.config.algorithm.policy_update import (
    Aggregation,
    ClippedUpdate,
    NormalizingUpdate,
    PolicyUpdate,
    RatioLevel,
    Signal,
)
from roll_core.config.algorithm.shaping import OverlongConfig, ShapingConfig
from roll_core.config.algorithm.teachers import TeacherConfig


class Baseline(StrEnum):
    """Mean that REINFORCE++ subtracts from rewards."""

    BATCH = "batch"
    """Mean of the batch."""
    GROUP = "group"
    """Mean of each group first, then that of the batch."""


class Reinforce(NormalizingUpdate):
    """REINFORCE (Williams 1992)."""

    uses_anchor: ClassVar[bool] = False
    kind: Literal["reinforce"] = "reinforce"
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Per token."""


class ReinforcePlusPlus(NormalizingUpdate, ClippedUpdate):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262)."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Baseline = Baseline.BATCH
    """`group` is the paper's REINFORCE++-baseline, for several trajectories a problem."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Per token; with baseline group, 1."""

    @property
    def compares_groups(self) -> bool:
        return self.baseline is Baseline.GROUP or super().compares_groups

    @model_validator(mode="after")
    def _check_group_baseline_is_undiscounted(self):
        if self.baseline is Baseline.GROUP and self.discount != 1:
            raise ValueError(f"discount ({self.discount}) must be 1 with baseline group, which compares whole outcomes")
        return self


class Grpo(ClippedUpdate):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300), with DAPO's token mean and clip-higher."""

    kind: Literal["grpo"] = "grpo"
    clip_high: PositiveFloat = 0.28
    """The policy ratio is clipped above at 1 + clip_high (DAPO's clip-higher, arXiv 2503.14476; the paper's is 0.2)."""
    scale_by_std: bool = True
    """Divide group-relative rewards by their standard deviation in the group."""


class DrGrpo(ClippedUpdate):
    """GRPO done right (Liu et al. 2025, arXiv 2503.20783): neither the group's spread nor its lengths weight a token."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = Aggregation.FIXED_LENGTH


class Rloo(PolicyUpdate):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740)."""

    uses_anchor: ClassVar[bool] = False
    kind: Literal["rloo"] = "rloo"
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM


class Ppo(NormalizingUpdate, ClippedUpdate):
    """Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347) with generalised advantages and a critic."""

    own_signals: ClassVar[frozenset[Signal]] = frozenset({Signal.VALUES})
    kind: Literal["ppo"] = "ppo"
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Per token."""
    trace_decay: float = Field(default=0.95, ge=0.0, le=1.0)
    """GAE's lambda (0.95); 1 is the Monte-Carlo return minus the value."""
    bootstrap_truncated: bool = False
    """Take the critic's value after the last token of a completion that was cut off, instead of 0 (arXiv 1712.00378): right
    where the limit is not part of the problem. A cut-off answer that is graded as wrong has ended."""
    whiten_advantages: bool = True
    """Standardise advantages over all tokens of the batch."""
    critic: CriticConfig = CriticConfig()
    """The value model."""

    @property
    def value_model(self) -> CriticConfig:
        return self.critic


class Remax(PolicyUpdate):
    """ReMax (Li et al. 2023, arXiv 2310.10505): one more completion a problem, greedy, as the baseline."""

    uses_anchor: ClassVar[bool] = False
    samples_greedily: ClassVar[bool] = True
    kind: Literal["remax"] = "remax"
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM

    @property
    def compares_groups(self) -> bool:
        return False


class Gigpo(ClippedUpdate):
    """Group-in-Group Policy Optimization (Feng et al. 2025, arXiv 2505.10978)."""

    kind: Literal["gigpo"] = "gigpo"
    episode_weight: NonNegativeFloat = 1.0
    """Weight of the whole trajectory's advantage in its group."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of each turn's advantage among those from the same state (the paper's omega: 1)."""
    discount: float = Field(default=0.95, gt=0.0, le=1.0)
    """Per turn, in the returns of steps."""
    scale_by_std: bool = True
    """Divide both advantages by the standard deviation of what they are compared with."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN

    @model_validator(mode="after")
    def _check_some_weight_is_positive(self):
        if self.episode_weight == self.step_weight == 0:
            raise ValueError("episode_weight and step_weight cannot both be 0: there would be no advantage")
        return self


class TurnReinforce(NormalizingUpdate, ClippedUpdate):
    """Turn-level REINFORCE: one return per turn for all of its tokens (ROLL's agentic REINFORCE, arXiv 2506.06122)."""

    kind: Literal["turn_reinforce"] = "turn_reinforce"
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Per turn."""
    whiten_advantages: bool = True
    """Standardise advantages over all tokens of the batch."""


class StepReinforce(ClippedUpdate):
    """Step-level REINFORCE: turn returns, normalised over the group's turns (ROLL's step REINFORCE, arXiv 2506.06122)."""

    kind: Literal["step_reinforce"] = "step_reinforce"
    discount: float = Field(default=0.95, gt=0.0, le=1.0)
    """Per turn."""


class Distillation(PolicyUpdate):
    """On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649): the policy's own tokens, judged by teachers."""

    uses_anchor: ClassVar[bool] = False
    own_signals: ClassVar[frozenset[Signal]] = frozenset({Signal.TEACHER})
    kind: Literal["distillation"] = "distillation"
    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    """Their advantages are added up, each with its weight."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of GRPO's advantage beside the teachers'; 0 is pure distillation."""

    @property
    def compares_groups(self) -> bool:
        return self.reward_weight > 0

    @model_validator(mode="after")
    def _check_shaped_rewards_have_a_weight(self):
        sections = (self.shaping, *self.domains.values())
        shaped = [key for key in ("kl", "overlong", "reward_clip") for s in sections if getattr(s, key) is not None]
        if shaped and not self.reward_weight:
            raise ValueError(f"shaping.{shaped[0]} has no effect while reward_weight is 0: only teachers count")
        return self


class Gspo(ClippedUpdate):
    """Group Sequence Policy Optimization (Zheng et al. 2025, arXiv 2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    """The ratio of a sequence is clipped below at 1 - clip_low (GSPO's 3e-4)."""
    clip_high: PositiveFloat = 4e-4
    """The ratio of a sequence is clipped above at 1 + clip_high (GSPO's 4e-4)."""
    level: Literal[RatioLevel.TURN, RatioLevel.SEQUENCE] = RatioLevel.SEQUENCE
    """`turn` gives each turn of a conversation its own ratio."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN

    @property
    def correction_level(self) -> CorrectionLevel:
        """Span of the policy ratio: its gradient would give the tokens that share it the mean of their weights."""
        return CorrectionLevel.SEGMENT if self.level is RatioLevel.TURN else CorrectionLevel.GEOMETRIC


class DapoShaping(ShapingConfig):
    """Shaping with the overlong penalty on by default."""

    overlong: OverlongConfig | None = OverlongConfig()
    """Penalty of long completions, on by default in DAPO; null is none."""


class Dapo(ClippedUpdate):
    """DAPO (Yu et al. 2025, arXiv 2503.14476): clip-higher, token mean, soft punishment of overlong completions."""

    kind: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28
    """The policy ratio is clipped above at 1 + clip_high (DAPO's 0.28)."""
    shaping: DapoShaping = DapoShaping()
    """As in every algorithm, with `overlong` on."""


class LitePpo(ClippedUpdate):
    """Lite PPO (Liu et al. 2025, arXiv 2508.08221): group mean, batch standard deviation, token mean."""

    kind: Literal["lite_ppo"] = "lite_ppo"


class RaftPlusPlus(ClippedUpdate):
    """RAFT++ (Xiong et al. 2025, arXiv 2504.11343): learn from the best answers alone, with clipped ratios."""

    kind: Literal["raft_plus_plus"] = "raft_plus_plus"
    minimum_reward: float = 0.0
    """A group whose best reward is not above this teaches nothing."""


class Cispo(PolicyUpdate):
    """CISPO (MiniMax 2025, arXiv 2506.13585): clip the importance weight, never the token."""

    kind: Literal["cispo"] = "cispo"
    clip_low: NonNegativeFloat = 1.0
    """Weights are at least 1 - clip_low; the paper sets no lower bound."""
    clip_high: PositiveFloat = 0.28
    """Weights are at most 1 + clip_high; the paper tunes it and gives no number, this is DAPO's."""
    mask_clipped: bool = False
    """Also remove tokens that PPO would have clipped."""
    scale_by_std: bool = True
    """Divide group-relative rewards by their standard deviation in the group."""


class TruncatedIs(PolicyUpdate):
    """Policy gradient with truncated importance weights against the sampler (Espeholt et al. 2018, arXiv 1802.01561)."""

    uses_anchor: ClassVar[bool] = False
    kind: Literal["tis"] = "tis"
    lower: NonNegativeFloat = 0.0
    """Weights are at least this."""
    upper: PositiveFloat = 1.0
    """Weights are at most this (IMPALA's 1)."""
    scale_by_std: bool = True
    """Divide group-relative rewards by their standard deviation in the group."""

    @property
    def has_correction(self) -> bool:
        return True

    @model_validator(mode="after")
    def _check_weights(self):
        _check_sampler_weights(self.lower, self.upper, self.correction)
        return self


class Topr(PolicyUpdate):
    """Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286); weighted TOPR with weights other than 1."""

    uses_anchor: ClassVar[bool] = False
    kind: Literal["topr"] = "topr"
    positive_weight: NonNegativeFloat = 1.0
    """Weight of trajectories with an advantage of 0 or more."""
    negative_weight: NonNegativeFloat = 1.0
    """Weight of the others; 0 learns from right answers alone."""
    reward_baseline: float | None = None
    """Subtracted from every reward (the paper: rewards of 1 and -1, baseline 0); null subtracts the group's mean."""
    lower: NonNegativeFloat = 0.0
    """Smallest weight of a negative trajectory (TOPR's 0)."""
    upper: PositiveFloat = 1.0
    """Largest weight of a negative trajectory (TOPR's 1)."""
    scale_by_std: bool = False
    """Divide group-relative rewards by their standard deviation in the group."""

    @property
    def compares_groups(self) -> bool:
        return self.reward_baseline is None

    @property
    def has_correction(self) -> bool:
        return True

    @model_validator(mode="after")
    def _check_weights(self):
        _check_sampler_weights(self.lower, self.upper, self.correction)
        if self.positive_weight == self.negative_weight == 0:
            raise ValueError("positive_weight and negative_weight cannot both be 0: nothing would be learned")
        if self.reward_baseline is not None and self.scale_by_std:
            raise ValueError("scale_by_std is about groups: leave it out with reward_baseline")
        return self

    @model_validator(mode="after")
    def _check_a_trajectory_has_one_sign(self):
        if self.charges_tokens:
            raise ValueError(
                "shaping.kl gives the tokens of a trajectory advantages of different signs, and topr treats a trajectory by "
                "its one sign: leave shaping.kl out and set kl_loss"
            )
        return self


class Kimi(PolicyUpdate):
    """Kimi k1.5's policy mirror descent (Kimi Team 2025, arXiv 2501.12599)."""

    kind: Literal["kimi"] = "kimi"
    temperature: PositiveFloat = 0.1
    """The paper's tau: weight of the squared log ratio to the anchor. The paper gives no number."""
    level: RatioLevel = RatioLevel.SEQUENCE
    """What the log ratio is summed over before it is squared; ROLL squares each token's."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM


class BehaviourWeighting(WeightingConfig):
    """Weighting by anchor / sampler without an upper limit by default."""

    upper: PositiveFloat | None = None
    """Largest weight; null never cuts off."""


class BehaviourCorrection(CorrectionConfig):
    """Correction that always weights by anchor / sampler."""

    weighting: BehaviourWeighting = BehaviourWeighting()
    """Weighting by anchor / sampler, which is part of the method: without it this is GRPO."""


class DecoupledPpo(ClippedUpdate):
    """Decoupled PPO (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298): clip around the anchor, weight by
    anchor / sampler. For samples that are several weights versions old."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    scale_by_std: bool = True
    """Divide group-relative rewards by their standard deviation in the group."""
    correction: BehaviourCorrection = BehaviourCorrection()
    """The behaviour weight; AReaL does not cut it off."""


def _check_sampler_weights(lower: float, upper: float, correction: CorrectionConfig | None) -> None:
    """Raise if bounds are out of order or a second weighting is set; for objectives that weight by policy / sampler."""
    if lower >= upper:
        raise ValueError(f"lower ({lower}) must be below upper ({upper})")
    if correction is not None and correction.weighting is not None:
        raise ValueError("the objective already weighs by policy / sampler: set correction.weighting to null")


AlgorithmConfig = Annotated[
    Reinforce
    | ReinforcePlusPlus
    | Grpo
    | DrGrpo
    | Rloo
    | Ppo
    | Remax
    | Gigpo
    | TurnReinforce
    | StepReinforce
    | Distillation
    | Gspo
    | Dapo
    | LitePpo
    | RaftPlusPlus
    | Cispo
    | TruncatedIs
    | Topr
    | Kimi
    | DecoupledPpo,
    Field(discriminator="kind"),
]
