"""Objectives of the policy, token by token, and the loss they add up to. Each is pure. Shapes as in `inputs.py`.

Notation of the docstrings: A advantage, pi policy, r = pi / anchor (or pi / sampler, where said), sg[x] x without gradient.
"""

from dataclasses import replace

import torch
from torch import Tensor

from roll_core.algorithms.corrections import Correction
from roll_core.algorithms.divergences import MAX_LOG_RATIO, KlEstimatorFn, k3
from roll_core.algorithms.grouping import masked_mean_by, sum_by
from roll_core.algorithms.inputs import LossInputs, LossOutputs, Objective, Reduction, TokenLosses, masked_sum
from roll_core.config.algorithm.policy_update import RatioLevel


def policy_gradient(inputs: LossInputs) -> TokenLosses:
    """REINFORCE: -A log pi, without any ratio."""
    return TokenLosses(-inputs.advantages_N * inputs.policy_logprobs_N, _nothing_clipped(inputs))


def clipped_ratio(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    level: RatioLevel = RatioLevel.TOKEN,
) -> TokenLosses:
    """PPO (arXiv 1707.06347): -min(r A, clip(r, 1 - low, 1 + high) A); with dual clip (arXiv 1912.09729) at most -dual_clip
    A for A < 0. With the geometric mean of a sequence's ratios: GSPO (arXiv 2507.18071); or of a turn's. The tokens that
    share a ratio must share an advantage, too: the gradient of the ratio gives each of them the mean advantage."""
    return _clipped_gain(inputs, _log_ratio(inputs, level).exp(), clip_low, clip_high, dual_clip)


def clipped_shared_ratio(
    inputs: LossInputs, *, clip_low: float, clip_high: float, level: RatioLevel, dual_clip: float | None = None
) -> TokenLosses:
    """GSPO-token (arXiv 2507.18071): `clipped_ratio` with sg[r] pi / sg[pi] in place of the shared ratio r. Each token keeps
    its own advantage in the gradient. Where tokens that share a ratio share an advantage, the gradient of their sum is that
    of `clipped_ratio`."""
    shared_N = _log_ratio(inputs, level).detach().exp()
    one_N = (inputs.policy_logprobs_N - inputs.policy_logprobs_N.detach()).exp()
    return _clipped_gain(inputs, shared_N * one_N, clip_low, clip_high, dual_clip)


def _clipped_gain(
    inputs: LossInputs, ratio_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLosses:
    """Objective of PPO for any ratio."""
    advantages_N = inputs.advantages_N
    clipped_ratio_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    gain_N = torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
    clipped_N = clipped_ratio_N * advantages_N < ratio_N * advantages_N
    if dual_clip is not None:
        floor_N = dual_clip * advantages_N
        is_floored_N = (advantages_N < 0) & (gain_N < floor_N)
        gain_N = torch.where(is_floored_N, floor_N, gain_N)
        clipped_N = clipped_N | is_floored_N
    return TokenLosses(-gain_N, clipped_N)


def truncated_importance_sampling(inputs: LossInputs, *, lower: float, upper: float) -> TokenLosses:
    """TIS (IMPALA's truncation, arXiv 1802.01561): -sg[clip(pi / sampler, lower, upper)] A log pi."""
    ratio_N = _sampler_ratio(inputs)
    weights_N = ratio_N.clamp(lower, upper)
    return TokenLosses(-weights_N * inputs.advantages_N * inputs.policy_logprobs_N, weights_N != ratio_N)


def clipped_importance_sampling(inputs: LossInputs, *, clip_low: float, clip_high: float, mask_clipped: bool) -> TokenLosses:
    """CISPO (arXiv 2506.13585): -sg[clip(r, 1 - low, 1 + high)] A log pi. The weight is clipped, and no token loses its
    gradient; `mask_clipped` removes the tokens that PPO would have clipped."""
    ratio_N = _log_ratio(inputs, RatioLevel.TOKEN).detach().exp()
    weights_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    clipped_N = weights_N * inputs.advantages_N < ratio_N * inputs.advantages_N
    if mask_clipped:
        weights_N = torch.where(clipped_N, torch.zeros_like(weights_N), weights_N)
    return TokenLosses(-weights_N * inputs.advantages_N * inputs.policy_logprobs_N, weights_N != ratio_N)


def tapered_off_policy(
    inputs: LossInputs, *, positive_weight: float, negative_weight: float, lower: float, upper: float
) -> TokenLosses:
    """TOPR (arXiv 2503.14286): -w+ A log pi where A >= 0, -w- sg[clip(pi / sampler, lower, upper)] A log pi where A < 0,
    with the ratio of the whole sequence. Wrong answers are pushed away only while the policy still gives them."""
    kept_N = torch.where(inputs.mask_N.bool(), _sampler_log_ratio(inputs), torch.zeros_like(inputs.sampler_logprobs_N))
    log_ratio_S = sum_by(kept_N, inputs.sequence_N, inputs.num_sequences)
    ratio_N = log_ratio_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[inputs.sequence_N]
    tapered_N = ratio_N.clamp(lower, upper)
    is_negative_N = inputs.advantages_N < 0
    weights_N = torch.where(is_negative_N, negative_weight * tapered_N, torch.full_like(tapered_N, positive_weight))
    return TokenLosses(-weights_N * inputs.advantages_N * inputs.policy_logprobs_N, is_negative_N & (tapered_N != ratio_N))


def mirror_descent(inputs: LossInputs, *, temperature: float, level: RatioLevel) -> TokenLosses:
    """Mirror descent (Kimi k1.5, arXiv 2501.12599): -A log pi + temperature / 2 (log r)^2. In the paper the square is that
    of the whole sequence's log ratio, which its tokens share equally; with level TOKEN it is that of each token's. The log
    ratio is not bounded: a bound would end the pull to the anchor where it is needed most."""
    log_ratio_N = inputs.policy_logprobs_N - inputs.anchor_logprobs_N
    if level is RatioLevel.TOKEN:
        penalty_N = log_ratio_N.square()
    else:
        index_N, count = _level(inputs, level)
        kept_N = torch.where(inputs.mask_N.bool(), log_ratio_N, torch.zeros_like(log_ratio_N))
        lengths_X = sum_by(inputs.mask_N, index_N, count).clamp(min=1)
        # `index_select` has a deterministic backward pass on several threads; an index with repeats has none.
        penalty_N = (sum_by(kept_N, index_N, count).square() / lengths_X).index_select(0, index_N)
    loss_N = -inputs.advantages_N * inputs.policy_logprobs_N + temperature / 2 * penalty_N
    return TokenLosses(loss_N, _nothing_clipped(inputs))


def policy_loss(
    inputs: LossInputs,
    *,
    objective: Objective,
    reduce: Reduction,
    correction: Correction | None = None,
    kl_coefficient: float = 0.0,
    kl_estimator: KlEstimatorFn = k3,
    entropy_coefficient: float = 0.0,
) -> LossOutputs:
    """Combine an objective and its weights with a KL penalty to the reference and an entropy bonus, and reduce them to the
    loss of the batch."""
    sums: dict[str, Tensor] = {}
    if correction is not None:
        inputs, sums = correction(inputs)
    inputs = _without_removed(inputs)
    tokens = objective(inputs)
    loss = reduce(inputs.weights_N * tokens.loss_N, inputs)
    if entropy_coefficient:
        loss = loss - entropy_coefficient * reduce(inputs.entropies_N, inputs)
    kl_N = _kl_to_reference(inputs, kl_estimator)
    if kl_N is not None:
        loss = loss + kl_coefficient * reduce(kl_N, inputs)
        sums["update/kl_to_reference"] = masked_sum(kl_N, inputs.mask_N)
    return LossOutputs(loss, sums | _metric_sums(inputs, tokens))


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """Negative log-likelihood, mean over tokens: the warm start and supervised fine-tuning."""
    nll_N = torch.where(inputs.mask_N.bool(), -inputs.policy_logprobs_N, torch.zeros_like(inputs.policy_logprobs_N))
    loss = nll_N.sum() / inputs.global_tokens
    return LossOutputs(loss, {"warm_start/entropy": masked_sum(inputs.entropies_N, inputs.mask_N)})


def _without_removed(inputs: LossInputs) -> LossInputs:
    """Zero the values of removed tokens. Otherwise a zero gradient times a ratio that is infinite or not a number would be
    not a number."""

    def blank(values_N: Tensor) -> Tensor:
        return torch.where(inputs.mask_N.bool(), values_N, torch.zeros_like(values_N))

    reference_N = inputs.reference_logprobs_N
    return replace(
        inputs,
        policy_logprobs_N=blank(inputs.policy_logprobs_N),
        anchor_logprobs_N=blank(inputs.anchor_logprobs_N),
        sampler_logprobs_N=blank(inputs.sampler_logprobs_N),
        advantages_N=blank(inputs.advantages_N),
        reference_logprobs_N=None if reference_N is None else blank(reference_N),
    )


def _kl_to_reference(inputs: LossInputs, estimator: KlEstimatorFn) -> Tensor | None:
    if inputs.divergences_N is not None:
        return inputs.divergences_N
    if inputs.reference_logprobs_N is not None:
        return estimator(inputs.policy_logprobs_N, inputs.reference_logprobs_N)
    return None


def _metric_sums(inputs: LossInputs, tokens: TokenLosses) -> dict[str, Tensor]:
    policy_N, mask_N = inputs.policy_logprobs_N.detach(), inputs.mask_N
    return {
        "update/clip_fraction": masked_sum(tokens.clipped_N, mask_N),
        "update/entropy": masked_sum(inputs.entropies_N, mask_N),
        # KL(anchor or sampler || policy): the tokens are the sampler's, so that k3 is unbiased in this direction.
        "update/kl_to_anchor": masked_sum(k3(inputs.anchor_logprobs_N, policy_N), mask_N),
        "update/kl_to_sampler": masked_sum(k3(inputs.sampler_logprobs_N, policy_N), mask_N),
    }


def _log_ratio(inputs: LossInputs, level: RatioLevel) -> Tensor:
    log_ratio_N = (inputs.policy_logprobs_N - inputs.anchor_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level is RatioLevel.TOKEN:
        return log_ratio_N
    index_N, count = _level(inputs, level)
    return masked_mean_by(log_ratio_N, inputs.mask_N, index_N, count).index_select(0, index_N)


def _level(inputs: LossInputs, level: RatioLevel) -> tuple[Tensor, int]:
    if level is RatioLevel.TURN:
        return inputs.turn_N, inputs.num_turns
    return inputs.sequence_N, inputs.num_sequences


def _sampler_log_ratio(inputs: LossInputs) -> Tensor:
    return inputs.policy_logprobs_N.detach() - inputs.sampler_logprobs_N


def _sampler_ratio(inputs: LossInputs) -> Tensor:
    return _sampler_log_ratio(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _nothing_clipped(inputs: LossInputs) -> Tensor:
    return torch.zeros_like(inputs.mask_N, dtype=torch.bool)
