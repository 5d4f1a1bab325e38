"""The named algorithms: an advantage, an objective, and the signals they need. `TABLE` reads like that of a survey;
`docs/algorithms.md` is written from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml

from roll_core.algorithms import advantages, divergences, losses, reductions
from roll_core.algorithms.corrections import Correction, correct
from roll_core.algorithms.credit import CreditRecipe
from roll_core.algorithms.divergences import KlEstimatorFn
from roll_core.algorithms.inputs import AdvantageFn, LossFn, Objective, Reduction, ValueLossFn
from roll_core.algorithms.values import clipped_value_loss
from roll_core.config.algorithm import methods, shaping
from roll_core.config.algorithm.methods import AlgorithmConfig, Baseline
from roll_core.config.algorithm.policy_update import Aggregation, ClippedUpdate, PolicyUpdate, Signal


@dataclass(frozen=True)
class CatalogEntry:
    """One algorithm of the table. The callables take the variant's config, so that a knob is read in one place."""

    config: type[PolicyUpdate]
    name: str
    paper: str
    formula: str
    use_when: str
    advantage: Callable[[Any], AdvantageFn]
    objective: Callable[[Any], Objective]
    example: str = ""
    """YAML of the keys that a config could, or must, have beside `kind`."""

    @property
    def kind(self) -> str:
        return self.config.model_fields["kind"].default

    @property
    def example_settings(self) -> dict[str, Any]:
        return yaml.safe_load(self.example) or {}


@dataclass(frozen=True)
class Algorithm:
    """Algorithm built from its config. `credit_signals` are needed before advantages can be computed, `loss_signals` only
    for samples that are trained on."""

    credit: CreditRecipe
    loss: LossFn
    value_loss: ValueLossFn | None
    credit_signals: frozenset[Signal]
    loss_signals: frozenset[Signal]
    full_kl_loss: bool
    """True if the loss takes the full-vocabulary KL, so that the reference runs beside the policy in the update."""
    skips_zero_advantages: bool
    """True if tokens of zero advantage have no gradient, so that their samples need no forward pass."""

    @property
    def signals(self) -> frozenset[Signal]:
        return self.credit_signals | self.loss_signals


def _clipped(config: ClippedUpdate) -> Objective:
    return partial(losses.clipped_ratio, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip)


def _sequence_clipped(config: methods.Gspo) -> Objective:
    # Both give one gradient where a sequence has one advantage, but round differently: runs without shaping.kl keep theirs.
    objective = losses.clipped_shared_ratio if config.charges_tokens else losses.clipped_ratio
    low, high = config.clip_low, config.clip_high
    return partial(objective, clip_low=low, clip_high=high, dual_clip=config.dual_clip, level=config.level)


def _group(config: Any) -> AdvantageFn:
    return advantages.group_normalized if config.scale_by_std else advantages.group_relative


CLIPPED = "-min(r A, clip(r, 1 - low, 1 + high) A)"

TABLE: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        methods.Reinforce,
        name="REINFORCE",
        paper="Williams 1992",
        formula="A_t = sum_k discount^k r_{t+k};  loss = -A log pi",
        use_when="As the plainest baseline, or with shaping.normalize as a method of your own.",
        advantage=lambda c: partial(advantages.monte_carlo_return, discount=c.discount),
        objective=lambda _: losses.policy_gradient,
        example="shaping: {normalize: {mean: batch, std: batch}}",
    ),
    CatalogEntry(
        methods.ReinforcePlusPlus,
        name="REINFORCE++",
        paper="arXiv 2501.03262",
        formula=f"A = whiten(return), or whiten(R - group mean) with baseline group;  loss = {CLIPPED}",
        use_when="One trajectory a problem, or many problems and few trajectories each; robust to groups of equal rewards.",
        advantage=lambda c: (
            advantages.group_baseline_batch_normalized
            if c.baseline is Baseline.GROUP
            else partial(advantages.batch_normalized, discount=c.discount)
        ),
        objective=_clipped,
    ),
    CatalogEntry(
        methods.Grpo,
        name="GRPO",
        paper="arXiv 2402.03300",
        formula=f"A = (R - group mean) / group std;  loss = {CLIPPED}, mean over tokens (the paper: over sequences)",
        use_when="The default: verifiable rewards, eight or more trajectories a problem.",
        advantage=_group,
        objective=_clipped,
    ),
    CatalogEntry(
        methods.DrGrpo,
        name="Dr.GRPO",
        paper="arXiv 2503.20783",
        formula=f"A = R - group mean;  loss = {CLIPPED}, summed over tokens / fixed length",
        use_when="When completions grow without getting better, or easy and hard groups should weigh as their rewards say.",
        advantage=lambda _: advantages.group_relative,
        objective=_clipped,
    ),
    CatalogEntry(
        methods.Rloo,
        name="RLOO",
        paper="arXiv 2402.14740",
        formula="A = R - mean of the others of the group, R with the KL penalty of shaping.kl;  loss = -A log pi",
        use_when="Small groups, one optimizer step an iteration: an unbiased baseline and no clipping.",
        advantage=lambda _: advantages.leave_one_out,
        objective=lambda _: losses.policy_gradient,
    ),
    CatalogEntry(
        methods.Ppo,
        name="PPO with a critic",
        paper="arXiv 1707.06347, 1506.02438",
        formula=f"d_t = r_t + discount V_(t+1) - V_t;  A_t = d_t + discount trace_decay A_(t+1);  loss = {CLIPPED}",
        use_when="Rewards within a trajectory, long horizons, or single trajectories: credit token by token.",
        advantage=lambda c: partial(
            advantages.generalized_advantage,
            discount=c.discount,
            trace_decay=c.trace_decay,
            bootstrap_truncated=c.bootstrap_truncated,
        ),
        objective=_clipped,
        example="critic: {optimizer: {learning_rate: 1.0e-5}, warmup_iterations: 5}",
    ),
    CatalogEntry(
        methods.Remax,
        name="ReMax",
        paper="arXiv 2310.10505",
        formula="A = R - R(greedy completion);  loss = -A log pi",
        use_when="One trajectory a problem and no critic: the greedy completion is the baseline.",
        advantage=lambda _: advantages.greedy_baseline,
        objective=lambda _: losses.policy_gradient,
    ),
    CatalogEntry(
        methods.Gigpo,
        name="GiGPO",
        paper="arXiv 2505.10978",
        formula=f"A = w_e norm_group(R) + w_s norm_(same state, same group)(return of the turn);  loss = {CLIPPED}",
        use_when="Agents that come through the same states in several trajectories of a group.",
        advantage=lambda c: partial(
            advantages.group_in_group,
            discount=c.discount,
            episode_weight=c.episode_weight,
            step_weight=c.step_weight,
            scale_by_std=c.scale_by_std,
        ),
        objective=_clipped,
    ),
    CatalogEntry(
        methods.TurnReinforce,
        name="Turn-level REINFORCE",
        paper="arXiv 2506.06122",
        formula=f"A = whiten(G_i), G_i = r_i + discount G_(i+1) over turns;  loss = {CLIPPED}",
        use_when="Agents whose environment pays turn by turn.",
        advantage=lambda c: partial(advantages.turn_return, discount=c.discount),
        objective=_clipped,
    ),
    CatalogEntry(
        methods.StepReinforce,
        name="Step-level REINFORCE",
        paper="arXiv 2506.06122",
        formula=f"A = norm_group(G_i) over all turns of the group;  loss = {CLIPPED}",
        use_when="Agents, several trajectories a problem, rewards late in the trajectory.",
        advantage=lambda c: partial(advantages.normalized_step_return, discount=c.discount),
        objective=_clipped,
    ),
    CatalogEntry(
        methods.Distillation,
        name="On-policy distillation",
        paper="arXiv 2306.13649",
        formula="A_t = sum_i c_i (log teacher_i - log sampler) [+ w A_GRPO];  loss = -A log pi",
        use_when="A better model exists: dense credit at the policy's own mistakes; several teachers by domain.",
        advantage=lambda c: (
            partial(advantages.distilled_and_rewarded, reward_weight=c.reward_weight)
            if c.reward_weight
            else advantages.reverse_kl_to_teachers
        ),
        objective=lambda _: losses.policy_gradient,
        example="teachers: [{kind: run, run_id: quickstart-1}]",
    ),
    CatalogEntry(
        methods.Gspo,
        name="GSPO",
        paper="arXiv 2507.18071",
        formula=(
            f"A as GRPO;  r = exp(mean_t log(pi / anchor)) of the sequence (or turn);  loss = {CLIPPED};  "
            "with shaping.kl, where A differs by token: sg[r] pi / sg[pi] in place of r (GSPO-token)"
        ),
        use_when="Mixtures of experts and long completions, where single tokens' ratios are noise.",
        advantage=lambda _: advantages.group_normalized,
        objective=_sequence_clipped,
    ),
    CatalogEntry(
        methods.Dapo,
        name="DAPO",
        paper="arXiv 2503.14476",
        formula=f"R := R - overlong penalty;  A as GRPO;  loss = {CLIPPED}, high > low, mean over tokens",
        use_when="Long reasoning: keeps exploration alive and completions within their limit.",
        advantage=lambda _: advantages.group_normalized,
        objective=_clipped,
    ),
    CatalogEntry(
        methods.LitePpo,
        name="Lite PPO",
        paper="arXiv 2508.08221",
        formula=f"A = (R - group mean) / batch std;  loss = {CLIPPED}, mean over tokens",
        use_when="Base models and rewards of few values, where a group's own std is too noisy.",
        advantage=lambda _: advantages.group_mean_batch_std,
        objective=_clipped,
    ),
    CatalogEntry(
        methods.RaftPlusPlus,
        name="RAFT++",
        paper="arXiv 2504.11343",
        formula=f"A = 1 for the best of a group, else 0;  loss = {CLIPPED}",
        use_when="Learning from right answers only: fast and safe at the start, less exploration later.",
        advantage=lambda c: partial(advantages.best_of_group, minimum_reward=c.minimum_reward),
        objective=_clipped,
    ),
    CatalogEntry(
        methods.Cispo,
        name="CISPO",
        paper="arXiv 2506.13585",
        formula="A as GRPO;  loss = -sg[clip(r, 1 - low, 1 + high)] A log pi",
        use_when="Several optimizer steps an iteration, when rare but decisive tokens must keep their gradient.",
        advantage=_group,
        objective=lambda c: partial(
            losses.clipped_importance_sampling,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            mask_clipped=c.mask_clipped,
        ),
    ),
    CatalogEntry(
        methods.TruncatedIs,
        name="TIS",
        paper="arXiv 1802.01561",
        formula="A as GRPO;  loss = -sg[clip(pi / sampler, lower, upper)] A log pi",
        use_when="Stale samples without anchor logprobs: one ratio corrects for age and arithmetic together.",
        advantage=_group,
        objective=lambda c: partial(losses.truncated_importance_sampling, lower=c.lower, upper=c.upper),
    ),
    CatalogEntry(
        methods.Topr,
        name="TOPR",
        paper="arXiv 2503.14286",
        formula="loss = -w+ A log pi for A >= 0, -w- sg[clip(pi / sampler, lower, upper)] A log pi for A < 0",
        use_when="Very stale or offline data: positives need no ratio, negatives fade out.",
        advantage=lambda c: (
            _group(c) if c.reward_baseline is None else partial(advantages.constant_baseline, baseline=c.reward_baseline)
        ),
        objective=lambda c: partial(
            losses.tapered_off_policy,
            positive_weight=c.positive_weight,
            negative_weight=c.negative_weight,
            lower=c.lower,
            upper=c.upper,
        ),
    ),
    CatalogEntry(
        methods.Kimi,
        name="Kimi k1.5 mirror descent",
        paper="arXiv 2501.12599",
        formula="A = R - group mean;  loss = -A log pi + tau / 2 (log r)^2",
        use_when="Several optimizer steps an iteration with a soft pull to the anchor instead of a clip.",
        advantage=lambda _: advantages.group_relative,
        objective=lambda c: partial(losses.mirror_descent, temperature=c.temperature, level=c.level),
    ),
    CatalogEntry(
        methods.DecoupledPpo,
        name="Decoupled PPO",
        paper="arXiv 2110.00641, 2505.24298",
        formula=f"A as GRPO;  loss = sg[anchor / sampler] * {CLIPPED}",
        use_when="Asynchronous training: clipped around the trainer's policy, weighted for the age of the sample.",
        advantage=_group,
        objective=_clipped,
    ),
)

KL_ESTIMATORS: dict[shaping.KlEstimator, KlEstimatorFn] = {
    shaping.KlEstimator.K1: divergences.k1,
    shaping.KlEstimator.K2: divergences.k2,
    shaping.KlEstimator.K3: divergences.k3,
    shaping.KlEstimator.ABSOLUTE: divergences.absolute,
}
"""Estimators computed from the logprobs of sampled tokens; `full` needs the distributions."""


def row_of(config: AlgorithmConfig) -> CatalogEntry:
    """Catalogue entry of a config."""
    return next(row for row in TABLE if row.config is type(config))


def build_algorithm(config: AlgorithmConfig, *, num_optimizer_steps: int, max_new_tokens: int) -> Algorithm:
    """Build the algorithm that a config names, for updates of `num_optimizer_steps` per iteration."""
    row = row_of(config)
    full_kl_loss = config.kl_loss is not None and config.kl_loss.estimator is shaping.KlEstimator.FULL
    return Algorithm(
        credit=_credit(config, row, max_new_tokens),
        loss=partial(
            losses.policy_loss,
            objective=row.objective(config),
            reduce=_reduction(config, max_new_tokens),
            correction=_correction(config),
            kl_coefficient=config.kl_loss.coefficient if config.kl_loss else 0.0,
            kl_estimator=KL_ESTIMATORS.get(config.kl_loss.estimator, divergences.k3) if config.kl_loss else divergences.k3,
            entropy_coefficient=config.entropy_coefficient,
        ),
        value_loss=(
            partial(clipped_value_loss, value_clip=config.value_model.value_clip) if config.value_model is not None else None
        ),
        credit_signals=config.credit_signals,
        loss_signals=config.loss_signals(num_optimizer_steps),
        full_kl_loss=full_kl_loss,
        skips_zero_advantages=_skips_zero_advantages(config),
    )


def _credit(config: AlgorithmConfig, row: CatalogEntry, max_new_tokens: int) -> CreditRecipe:
    sections = {"": config.shaping, **config.domains}
    penalties = {name: section.kl for name, section in sections.items() if section.kl is not None}
    return CreditRecipe(
        advantage=row.advantage(config),
        shaping=config.shaping,
        domains=dict(config.domains),
        kl_estimators={name: KL_ESTIMATORS[kl.estimator] for name, kl in penalties.items() if kl.estimator in KL_ESTIMATORS},
        max_new_tokens=max_new_tokens,
        whiten_advantages=config.whiten_advantages,
        advantage_clip=config.advantage_clip,
    )


def _reduction(config: AlgorithmConfig, max_new_tokens: int) -> Reduction:
    match config.aggregation:
        case Aggregation.TOKEN_MEAN:
            return reductions.token_mean
        case Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            return reductions.sequence_mean_token_mean
        case Aggregation.SEQUENCE_MEAN_TOKEN_SUM:
            return reductions.sequence_mean_token_sum
        case Aggregation.FIXED_LENGTH:
            return partial(reductions.fixed_length, length=config.fixed_length_tokens or max_new_tokens)


def _correction(config: AlgorithmConfig) -> Correction | None:
    if config.correction is None:
        return None
    knobs = config.correction
    return partial(correct, weighting=knobs.weighting, filters=knobs.filters, veto_below=knobs.veto_below)


def _skips_zero_advantages(config: AlgorithmConfig) -> bool:
    regularized = config.kl_loss is not None or config.entropy_coefficient > 0
    return not regularized and not config.has_critic and not isinstance(config, methods.Kimi)
