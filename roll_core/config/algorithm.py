"""Algorithms, one variant each, with the knobs of that method only. `roll_core.algorithms.catalog` composes them.

A default is the paper's value where the paper has one. What all methods share is in `PolicyUpdate`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import Section
from roll_core.config.correction import CorrectionConfig, WeightingConfig
from roll_core.config.model import ModelConfig
from roll_core.config.shaping import KlEstimator, NormalizingConfig, OverlongConfig, ShapingConfig, StatisticsFrom
from roll_core.config.training import OptimizerConfig


class Aggregation(StrEnum):
    """How token losses become one number, always over the whole batch of an optimizer step."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    FIXED_LENGTH = "fixed_length"


class RatioLevel(StrEnum):
    """Over what the logarithm of the policy ratio is averaged."""

    TOKEN = "token"
    TURN = "turn"
    SEQUENCE = "sequence"


class Signal(StrEnum):
    """What is computed before the update because an algorithm declares it; what nobody declares is not computed."""

    ANCHOR = "anchor"
    REFERENCE = "reference"
    DIVERGENCE = "divergence"
    TEACHER = "teacher"
    VALUES = "values"


class Baseline(StrEnum):
    """What REINFORCE++ subtracts: the mean of the batch, or first that of each group."""

    BATCH = "batch"
    GROUP = "group"


class KlLossConfig(Section):
    """+ coefficient * KL(policy || reference) in the loss; the reference is the policy the run began with."""

    coefficient: PositiveFloat = 0.001
    """0.04 in GRPO's paper, 0.001 and less in later practice."""
    estimator: KlEstimator = KlEstimator.K3


class PolicyUpdate(Section):
    """What every algorithm has."""

    uses_anchor: ClassVar[bool] = True
    """False for objectives without a ratio to the anchor."""
    own_signals: ClassVar[frozenset[Signal]] = frozenset()
    """What the method's advantages are made of, whatever its knobs."""
    samples_greedily: ClassVar[bool] = False
    """True where each problem is also attempted once without chance, as a baseline."""

    shaping: ShapingConfig = ShapingConfig()
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
    fixed_length_tokens: PositiveInt | None = None
    """What `aggregation: fixed_length` divides by; null takes rollout.max_new_tokens."""

    @model_validator(mode="after")
    def _fixed_length_is_used(self):
        if self.fixed_length_tokens is not None and self.aggregation is not Aggregation.FIXED_LENGTH:
            raise ValueError(
                f"fixed_length_tokens ({self.fixed_length_tokens}) needs aggregation fixed_length, not {self.aggregation}"
            )
        return self

    @property
    def compares_groups(self) -> bool:
        """False where a trajectory needs no others of its problem to be judged."""
        return True

    @property
    def has_critic(self) -> bool:
        """True where a value model learns beside the policy: one more update in every iteration."""
        return Signal.VALUES in self.own_signals

    @property
    def credit_signals(self) -> frozenset[Signal]:
        """What advantages are made of, beside rewards."""
        penalties = [section.kl for section in (self.shaping, *self.domains.values()) if section.kl is not None]
        signals = set(self.own_signals)
        for penalty in penalties:
            full = penalty.estimator is KlEstimator.FULL
            signals |= {Signal.DIVERGENCE} if full else {Signal.ANCHOR, Signal.REFERENCE}
        return frozenset(signals)

    def loss_signals(self, num_optimizer_steps: int) -> frozenset[Signal]:
        """What the loss needs. With a single optimizer step the policy is its own anchor until it moves."""
        signals = set()
        if num_optimizer_steps > 1 and (self.uses_anchor or self.correction is not None):
            signals.add(Signal.ANCHOR)
        if self.kl_loss is not None and self.kl_loss.estimator is not KlEstimator.FULL:
            signals.add(Signal.REFERENCE)
        return frozenset(signals)

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss is not None or any(s.kl is not None for s in (self.shaping, *self.domains.values()))


class NormalizingUpdate(PolicyUpdate):
    """For algorithms without a baseline of their own: rewards can be normalised."""

    shaping: NormalizingConfig = NormalizingConfig()
    """As in every algorithm, and with `normalize`."""
    domains: Mapping[str, NormalizingConfig] = {}
    """Shaping for the problems of a domain, instead of `shaping`."""

    @property
    def compares_groups(self) -> bool:
        normalized = [s.normalize for s in (self.shaping, *self.domains.values()) if s.normalize is not None]
        return any(StatisticsFrom.GROUP in (normalize.mean, normalize.std) for normalize in normalized)


class ClippedUpdate(PolicyUpdate):
    """What every algorithm with PPO's clipped ratio has."""

    clip_low: PositiveFloat = 0.2
    """The policy ratio is clipped below at 1 - clip_low (PPO's 0.2)."""
    clip_high: PositiveFloat = 0.2
    """The policy ratio is clipped above at 1 + clip_high (PPO's 0.2)."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """For negative advantages the loss is at most minus this times the advantage (3 in arXiv 1912.09729); null: no bound."""

    @model_validator(mode="after")
    def _clip_low_below_one(self):
        if self.clip_low >= 1:
            raise ValueError(f"clip_low ({self.clip_low}) must be below 1: the ratio is clipped at 1 - clip_low")
        return self


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
    def _discount_has_an_effect(self):
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


class CriticConfig(Section):
    """A value model of the policy's shape, starting from its weights, trained beside it."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """A critic learns with about ten times the policy's learning rate (InstructGPT: 9e-6)."""
    value_clip: PositiveFloat | None = 0.2
    """A value may move this far from where it was before its loss stops falling (PPO's 0.2); null does not clip."""
    warmup_iterations: NonNegativeInt = 0
    """Iterations in which the critic learns and the policy does not move."""


class Ppo(NormalizingUpdate, ClippedUpdate):
    """Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347) with generalised advantages and a critic."""

    own_signals: ClassVar[frozenset[Signal]] = frozenset({Signal.VALUES})
    kind: Literal["ppo"] = "ppo"
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Per token."""
    trace_decay: float = Field(default=0.95, ge=0.0, le=1.0)
    """GAE's lambda (0.95); 1 is the Monte-Carlo return minus the value."""
    bootstrap_truncated: bool = True
    """Take the critic's value after the last token of a completion that was cut off (arXiv 1712.00378), instead of 0."""
    whiten_advantages: bool = True
    critic: CriticConfig = CriticConfig()


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
    step_weight: NonNegativeFloat = 1.0
    """The paper's omega."""
    discount: float = Field(default=0.95, gt=0.0, le=1.0)
    """Per turn, in the returns of steps."""
    scale_by_std: bool = True
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN


class TurnReinforce(NormalizingUpdate, ClippedUpdate):
    """One return per turn, the same for all of its tokens (ROLL's agentic REINFORCE, arXiv 2506.06122)."""

    kind: Literal["turn_reinforce"] = "turn_reinforce"
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Per turn."""
    whiten_advantages: bool = True


class StepReinforce(ClippedUpdate):
    """Returns of turns, normalised over the turns of the group (ROLL's step REINFORCE, arXiv 2506.06122)."""

    kind: Literal["step_reinforce"] = "step_reinforce"
    discount: float = Field(default=0.95, gt=0.0, le=1.0)
    """Per turn."""


class PretrainedTeacher(Section):
    """A model of its own."""

    kind: Literal["pretrained"] = "pretrained"
    model: ModelConfig
    """Must read the same tokens as the policy."""
    weight: PositiveFloat = 1.0
    domains: tuple[str, ...] = ()
    """Teaches only problems of these domains; empty: all."""


class RunTeacher(Section):
    """The policy another run of the same model ended with."""

    kind: Literal["run"] = "run"
    run_id: str
    """A run in the same store, for example quickstart-1; its last checkpoint teaches."""
    weight: PositiveFloat = 1.0
    domains: tuple[str, ...] = ()
    """Teaches only problems of these domains; empty: all."""


TeacherConfig = Annotated[PretrainedTeacher | RunTeacher, Field(discriminator="kind")]


class Distillation(PolicyUpdate):
    """On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649): the policy's own tokens, judged by teachers."""

    uses_anchor: ClassVar[bool] = False
    own_signals: ClassVar[frozenset[Signal]] = frozenset({Signal.TEACHER})
    kind: Literal["distillation"] = "distillation"
    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    reward_weight: NonNegativeFloat = 0.0
    """Weight of GRPO's advantage beside the teachers'; 0 is pure distillation."""

    @property
    def compares_groups(self) -> bool:
        return self.reward_weight > 0

    @model_validator(mode="after")
    def _rewards_have_an_effect(self):
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
    level: RatioLevel = RatioLevel.SEQUENCE
    """`turn` gives each turn of a conversation its own ratio."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN


class Dapo(ClippedUpdate):
    """DAPO (Yu et al. 2025, arXiv 2503.14476): clip-higher, token mean, soft punishment of overlong completions."""

    kind: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28
    """The policy ratio is clipped above at 1 + clip_high (DAPO's 0.28)."""
    shaping: ShapingConfig = ShapingConfig(overlong=OverlongConfig())


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
    """Weights are at most 1 + clip_high."""
    mask_clipped: bool = False
    """Also remove tokens that PPO would have clipped."""
    scale_by_std: bool = True


class TruncatedIs(PolicyUpdate):
    """Policy gradient with truncated importance weights against the sampler (Espeholt et al. 2018, arXiv 1802.01561)."""

    uses_anchor: ClassVar[bool] = False
    kind: Literal["tis"] = "tis"
    lower: NonNegativeFloat = 0.0
    """Weights are at least this."""
    upper: PositiveFloat = 1.0
    """Weights are at most this (IMPALA's 1)."""
    scale_by_std: bool = True

    @model_validator(mode="after")
    def _in_order(self):
        if self.lower >= self.upper:
            raise ValueError(f"lower ({self.lower}) must be below upper ({self.upper})")
        return self


class Topr(PolicyUpdate):
    """Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286); weighted TOPR with weights other than 1."""

    uses_anchor: ClassVar[bool] = False
    kind: Literal["topr"] = "topr"
    positive_weight: NonNegativeFloat = 1.0
    negative_weight: NonNegativeFloat = 1.0
    lower: NonNegativeFloat = 0.0
    """Smallest weight of a negative trajectory (TOPR's 0)."""
    upper: PositiveFloat = 1.0
    """Largest weight of a negative trajectory (TOPR's 1)."""
    scale_by_std: bool = False


class Kimi(PolicyUpdate):
    """Kimi k1.5's policy mirror descent (Kimi Team 2025, arXiv 2501.12599)."""

    kind: Literal["kimi"] = "kimi"
    temperature: PositiveFloat = 0.1
    """The paper's tau: weight of the squared log ratio to the anchor."""
    level: RatioLevel = RatioLevel.SEQUENCE
    """What the log ratio is summed over before it is squared; ROLL squares each token's."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM


class DecoupledPpo(ClippedUpdate):
    """Decoupled PPO (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298): clip around the anchor, weight by
    anchor / sampler. For samples that are several weights versions old."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    scale_by_std: bool = True
    correction: CorrectionConfig = CorrectionConfig(weighting=WeightingConfig(upper=None))
    """The behaviour weight; AReaL does not cut it off."""


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
