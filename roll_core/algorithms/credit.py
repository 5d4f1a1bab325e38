"""Credit assignment for graded trajectories: rewards are shaped, domain by domain if configured, and become advantages;
masks and weights say which trajectories are trained on, and how much each counts. Pure: the state that changes between
iterations is an argument, and the next state is returned."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from roll_core.algorithms import masks
from roll_core.algorithms.advantages import whitened
from roll_core.algorithms.divergences import KlEstimatorFn
from roll_core.algorithms.grouping import sum_by
from roll_core.algorithms.inputs import AdvantageFn, AdvantageInputs
from roll_core.algorithms.shaping import Moments, adapted_coefficient, divisors, normalized, overlong_penalty
from roll_core.config.algorithm.shaping import (
    KlRewardConfig,
    MasksConfig,
    NormalizingConfig,
    OverlongConfig,
    SampleWeightsConfig,
    ShapingConfig,
    StatisticsFrom,
)
from roll_core.types.refs import Record


class CreditState(Record):
    """State of credit assignment between iterations; part of every checkpoint.

    Example: CreditState(moments={"sort": Moments(count=512.0, mean=0.4, squares=90.1)}, kl_coefficients={"": 0.0012})
    """

    moments: dict[str, Moments] = Field(default_factory=dict)
    """Moments of the rewards seen so far, with their overlong penalties, by domain."""
    kl_coefficients: dict[str, float] = Field(default_factory=dict)
    """Weight of the KL in the reward where it adapts, by domain; "" is the weight for all domains without a section of their
    own."""


@dataclass(frozen=True)
class CreditInputs:
    """Inputs of credit assignment. `outcomes` holds the rewards as graded. `divergences_N` is the full-vocabulary KL to the
    reference, if the algorithm needs it."""

    outcomes: AdvantageInputs
    correct_S: Tensor
    domain_S: Tensor
    domains: tuple[str, ...]
    anchor_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    divergences_N: Tensor | None = None
    greedy_lengths_S: Tensor | None = None
    """Number of tokens of the greedy completion to the same problem."""


@dataclass(frozen=True)
class CreditRecipe:
    """Settings and functions of credit assignment, as an algorithm's config names them."""

    advantage: AdvantageFn
    shaping: ShapingConfig
    domains: dict[str, ShapingConfig]
    kl_estimators: dict[str, KlEstimatorFn]
    """Estimators of the KL in the reward, by section: "" and the domains."""
    max_new_tokens: int
    whiten_advantages: bool
    advantage_clip: float | None


@dataclass(frozen=True)
class Credit:
    """Result of credit assignment. `kept_S` is false for trajectories that are not trained on. `weights_S` has a mean of 1
    over the others (0 if they all weigh nothing). `returns_N` is what the critic is to predict, before advantages are
    whitened and clipped."""

    advantages_N: Tensor
    returns_N: Tensor | None
    weights_S: Tensor
    kept_S: Tensor
    metrics: dict[str, float]


def assign_credit(inputs: CreditInputs, recipe: CreditRecipe, state: CreditState) -> tuple[Credit, CreditState]:
    """Assign credit for a whole iteration; return it with the state after it."""
    sections = _sections(inputs, recipe)
    inputs = _charged_for_length(inputs, sections, recipe.max_new_tokens)
    shaped = _shape(inputs, sections, recipe, _with_rewards(inputs, recipe, state))
    advantages_N = recipe.advantage(shaped.outcomes)
    values_N = inputs.outcomes.values_N
    returns_N = None if values_N is None else advantages_N + values_N
    if recipe.whiten_advantages:
        advantages_N = whitened(advantages_N)
    metrics = dict(shaped.metrics)
    if recipe.advantage_clip is not None:
        clipped_N = advantages_N.clamp(-recipe.advantage_clip, recipe.advantage_clip)
        metrics["advantage/clip_fraction"] = _share(clipped_N != advantages_N)
        advantages_N = clipped_N
    metrics["advantage/mean"], metrics["advantage/largest"] = advantages_N.mean().item(), advantages_N.abs().max().item()
    kept_S = shaped.kept_S
    weights_S = torch.ones_like(shaped.weights_S).masked_scatter(
        kept_S, masks.rescaled_to_mean_one(shaped.weights_S[kept_S])
    )
    metrics["sample/masked"] = _share(~kept_S)
    return Credit(advantages_N, returns_N, weights_S, kept_S, metrics), shaped.state


@dataclass(frozen=True)
class _Section:
    """Shaping settings and the trajectories of this batch that they apply to: those of a domain, or (name "") those of all
    domains without settings of their own."""

    name: str
    config: ShapingConfig
    is_here_S: Tensor

    def metric(self, name: str) -> str:
        return f"{name}/{self.name}" if self.name else name


def _sections(inputs: CreditInputs, recipe: CreditRecipe) -> list[_Section]:
    own_D = torch.tensor([domain in recipe.domains for domain in inputs.domains])
    sections = [_Section("", recipe.shaping, ~own_D[inputs.domain_S])]
    for number, domain in enumerate(inputs.domains):
        if domain in recipe.domains:
            sections.append(_Section(domain, recipe.domains[domain], inputs.domain_S == number))
    return [section for section in sections if bool(section.is_here_S.any())]


def _charged_for_length(inputs: CreditInputs, sections: list[_Section], max_new_tokens: int) -> CreditInputs:
    """Add the penalty for overlong completions to the rewards; a greedy baseline is charged for its own length."""
    rewards_S, greedy_S = inputs.outcomes.rewards_S, inputs.outcomes.greedy_rewards_S
    for section in sections:
        if section.config.overlong is None:
            continue
        charge = partial(_length_charge, config=section.config.overlong, max_new_tokens=max_new_tokens)
        rewards_S = torch.where(section.is_here_S, rewards_S + charge(_lengths(inputs)), rewards_S)
        if greedy_S is not None:
            assert inputs.greedy_lengths_S is not None
            greedy_S = torch.where(section.is_here_S, greedy_S + charge(inputs.greedy_lengths_S), greedy_S)
    return replace(inputs, outcomes=replace(inputs.outcomes, rewards_S=rewards_S, greedy_rewards_S=greedy_S))


def _length_charge(lengths_S: Tensor, *, config: OverlongConfig, max_new_tokens: int) -> Tensor:
    buffer_tokens = config.buffer_tokens or max(1, max_new_tokens // 5)
    return config.weight * overlong_penalty(lengths_S, max_tokens=max_new_tokens, buffer_tokens=buffer_tokens)


def _with_rewards(inputs: CreditInputs, recipe: CreditRecipe, state: CreditState) -> CreditState:
    """Add this batch's rewards to the state's moments, if any section normalises by them."""
    sections = [s for s in (recipe.shaping, *recipe.domains.values()) if isinstance(s, NormalizingConfig) and s.normalize]
    if not any(StatisticsFrom.RUNNING in (s.normalize.mean, s.normalize.std) for s in sections if s.normalize):
        return state
    moments = dict(state.moments)
    for number, domain in enumerate(inputs.domains):
        moments[domain] = moments.get(domain, Moments()).with_values(inputs.outcomes.rewards_S[inputs.domain_S == number])
    return state.model_copy(update={"moments": moments})


@dataclass(frozen=True)
class _Shaped:
    outcomes: AdvantageInputs
    kept_S: Tensor
    weights_S: Tensor
    metrics: dict[str, float]
    state: CreditState


def _shape(inputs: CreditInputs, sections: list[_Section], recipe: CreditRecipe, state: CreditState) -> _Shaped:
    """Apply each section's settings to its trajectories; group and batch statistics are those of the whole batch."""
    outcomes = inputs.outcomes
    rewards_S, kept_S, greedy_S = outcomes.rewards_S, torch.ones_like(outcomes.truncated_S), outcomes.greedy_rewards_S
    scale_S, weights_S = torch.ones_like(rewards_S), torch.ones_like(rewards_S)
    token_rewards_N: Tensor | None = None
    metrics: dict[str, float] = {}
    coefficients = dict(state.kl_coefficients)
    for section in sections:
        config, is_here_S = section.config, section.is_here_S
        shaped_S, factor_S = _normalized_rewards(inputs, config, state)
        if config.reward_clip is not None:
            clipped_S = shaped_S.clamp(-config.reward_clip, config.reward_clip)
            is_clipped_S = clipped_S != shaped_S
            metrics[section.metric("reward/clip_fraction")] = _share(is_clipped_S[is_here_S])
            shaped_S, factor_S = clipped_S, torch.where(is_clipped_S, factor_S * clipped_S / shaped_S, factor_S)
            if greedy_S is not None:
                greedy_S = torch.where(is_here_S, greedy_S.clamp(-config.reward_clip, config.reward_clip), greedy_S)
        rewards_S, scale_S = torch.where(is_here_S, shaped_S, rewards_S), torch.where(is_here_S, factor_S, scale_S)
        kept_S = torch.where(is_here_S, _kept(inputs, config.masks), kept_S)
        weights_S = torch.where(is_here_S, _weights(inputs, config.weights, is_here_S), weights_S)
        if config.kl is not None:
            kl_N = _kl(inputs, recipe.kl_estimators.get(section.name))
            coefficient = coefficients.get(section.name, config.kl.coefficient)
            if token_rewards_N is None:
                token_rewards_N = torch.zeros_like(kl_N)
            charge_N = _clipped(-coefficient * kl_N, config.kl.token_reward_clip)
            token_rewards_N = torch.where(is_here_S[outcomes.sequence_N], charge_N, token_rewards_N)
            kl = sum_by(kl_N, outcomes.sequence_N, outcomes.num_sequences)[is_here_S].mean().item()
            metrics |= {section.metric("reward/kl"): kl, section.metric("reward/kl_coefficient"): coefficient}
            coefficients |= _next_coefficient(section, config.kl, coefficient, kl)
    return _Shaped(
        replace(
            outcomes,
            rewards_S=rewards_S,
            turn_rewards_T=outcomes.turn_rewards_T * scale_S[outcomes.sequence_T],
            greedy_rewards_S=greedy_S,
            token_rewards_N=token_rewards_N,
        ),
        kept_S,
        weights_S,
        metrics,
        CreditState(moments=state.moments, kl_coefficients=coefficients),
    )


def _normalized_rewards(inputs: CreditInputs, section: ShapingConfig, state: CreditState) -> tuple[Tensor, Tensor]:
    """Normalised rewards, and the factors by which turn rewards must be multiplied to stay a part of them."""
    rewards_S = inputs.outcomes.rewards_S
    if not isinstance(section, NormalizingConfig) or section.normalize is None:
        return rewards_S, torch.ones_like(rewards_S)
    mean_from, std_from = section.normalize.mean, section.normalize.std
    group_S, domain_S = inputs.outcomes.group_S, inputs.domain_S
    moments_D = [state.moments.get(domain, Moments()) for domain in inputs.domains]
    scale_S = 1 / divisors(rewards_S, std_from=std_from, group_S=group_S, domain_S=domain_S, moments_D=moments_D)
    rewards_S = normalized(
        rewards_S, mean_from=mean_from, std_from=std_from, group_S=group_S, domain_S=domain_S, moments_D=moments_D
    )
    return rewards_S, scale_S


def _kept(inputs: CreditInputs, section: MasksConfig) -> Tensor:
    outcomes, kept_S = inputs.outcomes, torch.ones_like(inputs.outcomes.truncated_S)
    if section.truncated:
        kept_S = kept_S & masks.is_whole(outcomes.truncated_S)
    if section.min_accuracy is not None or section.max_accuracy is not None:
        low = -1.0 if section.min_accuracy is None else section.min_accuracy
        high = 2.0 if section.max_accuracy is None else section.max_accuracy
        kept_S = kept_S & masks.is_of_use(inputs.correct_S, outcomes.group_S, min_accuracy=low, max_accuracy=high)
    if section.wrong_above_tokens is not None:
        limit = section.wrong_above_tokens
        kept_S = kept_S & masks.is_not_long_and_wrong(inputs.correct_S, _lengths(inputs), max_tokens=limit)
    return kept_S


def _weights(inputs: CreditInputs, section: SampleWeightsConfig, is_here_S: Tensor) -> Tensor:
    weights_S = torch.ones_like(inputs.outcomes.rewards_S)
    if section.difficulty is not None:
        easiest, hardest = section.difficulty.first, section.difficulty.last
        group_S = inputs.outcomes.group_S
        weights_S = weights_S * masks.difficulty_weights(inputs.correct_S, group_S, easiest=easiest, hardest=hardest)
    if section.length is not None:
        shortest, longest = section.length.first, section.length.last
        of_section = masks.length_weights(_lengths(inputs)[is_here_S], shortest=shortest, longest=longest)
        weights_S = weights_S.masked_scatter(is_here_S, weights_S[is_here_S] * of_section)
    return weights_S


def _kl(inputs: CreditInputs, estimator: KlEstimatorFn | None) -> Tensor:
    if estimator is None:
        assert inputs.divergences_N is not None, "full-vocabulary divergences were not computed"
        return inputs.divergences_N
    assert inputs.anchor_logprobs_N is not None, "anchor logprobs were not computed"
    assert inputs.reference_logprobs_N is not None, "reference logprobs were not computed"
    return estimator(inputs.anchor_logprobs_N, inputs.reference_logprobs_N)


def _next_coefficient(section: _Section, kl: KlRewardConfig, coefficient: float, measured: float) -> dict[str, float]:
    if kl.adaptive is None:
        return {}
    adapted = adapted_coefficient(
        coefficient,
        measured=measured,
        target=kl.adaptive.target,
        num_samples=int(section.is_here_S.sum()),
        horizon=kl.adaptive.horizon,
        max_error=kl.adaptive.max_error,
    )
    return {section.name: adapted}


def _clipped(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)


def _lengths(inputs: CreditInputs) -> Tensor:
    return torch.bincount(inputs.outcomes.sequence_N, minlength=inputs.outcomes.num_sequences)


def _share(flags: Tensor) -> float:
    return flags.double().mean().item() if len(flags) else 0.0
