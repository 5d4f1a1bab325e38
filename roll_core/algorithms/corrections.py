"""Corrections for tokens that were sampled by another policy than the trainer's: engines round differently, and weights
become stale.

All of them are computed from the importance ratio w = anchor / sampler, without gradient. Shapes as in `inputs.py`.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from roll_core.algorithms.divergences import MAX_LOG_RATIO
from roll_core.algorithms.grouping import masked_mean_by, min_by, sum_by
from roll_core.algorithms.inputs import LossInputs, masked_sum
from roll_core.config.algorithm.correction import Compared, CorrectionLevel, FilterConfig, WeightingConfig

Correction = Callable[[LossInputs], tuple[LossInputs, dict[str, Tensor]]]
"""Function from the inputs of a loss to corrected inputs and sums to report."""


def correct(
    inputs: LossInputs, *, weighting: WeightingConfig | None, filters: tuple[FilterConfig, ...], veto_below: float | None
) -> tuple[LossInputs, dict[str, Tensor]]:
    """Apply weights and masks for the mismatch to the inputs; return these with sums to report.

    A sequence with a token whose ratio is below `veto_below` is removed whole: the trainer finds that token all but
    impossible. Filters do not see each other's removals, so their order does not matter. Removed tokens do not count in the
    means and products of weights.
    """
    mask_N = inputs.mask_N
    for each in filters:
        mask_N = mask_N * is_kept(inputs, each).to(mask_N.dtype)
    if veto_below is not None:
        mask_N = mask_N * is_not_vetoed(inputs, veto_below).to(mask_N.dtype)
    weights_N = torch.ones_like(mask_N)
    if weighting is not None:
        upper = math.inf if weighting.upper is None else weighting.upper
        ratio_N = importance_ratio(replace(inputs, mask_N=mask_N), weighting.level)
        weights_N = ratio_N.clamp(weighting.lower, upper).to(mask_N.dtype)
    # A product would let a removed token's ratio through where it is not a number.
    applied_N = torch.where(mask_N.bool(), weights_N, torch.zeros_like(weights_N))
    sums = {
        "correction/kept": masked_sum(mask_N, inputs.mask_N),
        WEIGHT: masked_sum(applied_N, inputs.mask_N),
        WEIGHT_SQUARED: masked_sum(applied_N.square(), inputs.mask_N),
    }
    return replace(inputs, mask_N=mask_N, weights_N=inputs.weights_N * applied_N), sums


def importance_ratio(inputs: LossInputs, level: CorrectionLevel) -> Tensor:
    """Importance ratio w of each token, or the one it shares with its turn or sequence. Tokens removed earlier do not count
    in means and products."""
    return _shared_log_ratio(inputs, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _shared_log_ratio(inputs: LossInputs, level: CorrectionLevel) -> Tensor:
    log_ratio_N = _log_ratio(inputs)
    match level:
        case CorrectionLevel.TOKEN:
            return log_ratio_N
        case CorrectionLevel.SEGMENT:
            return masked_mean_by(log_ratio_N, inputs.mask_N, inputs.turn_N, inputs.num_turns)[inputs.turn_N]
        case CorrectionLevel.GEOMETRIC:
            means_S = masked_mean_by(log_ratio_N, inputs.mask_N, inputs.sequence_N, inputs.num_sequences)
            return means_S[inputs.sequence_N]
        case CorrectionLevel.SEQUENCE:
            kept_N = torch.where(inputs.mask_N.bool(), log_ratio_N, torch.zeros_like(log_ratio_N))
            return sum_by(kept_N, inputs.sequence_N, inputs.num_sequences)[inputs.sequence_N]


def probability_difference(inputs: LossInputs, level: CorrectionLevel) -> Tensor:
    """Anchor minus sampler probability of each token, or its mean over the tokens that share one ratio."""
    difference_N = (inputs.anchor_logprobs_N.exp() - inputs.sampler_logprobs_N.exp()).detach()
    match level:
        case CorrectionLevel.TOKEN:
            return difference_N
        case CorrectionLevel.SEGMENT:
            return masked_mean_by(difference_N, inputs.mask_N, inputs.turn_N, inputs.num_turns)[inputs.turn_N]
        case CorrectionLevel.GEOMETRIC:
            means_S = masked_mean_by(difference_N, inputs.mask_N, inputs.sequence_N, inputs.num_sequences)
            return means_S[inputs.sequence_N]
        case CorrectionLevel.SEQUENCE:
            raise AssertionError("FilterConfig refuses differences of whole sequences")


def is_kept(inputs: LossInputs, each: FilterConfig) -> Tensor:
    """True for tokens that a filter keeps: their ratio or probability difference is within its bounds."""
    compared = importance_ratio if each.compared is Compared.RATIO else probability_difference
    values_N = compared(inputs, each.level)
    lower, upper = each.bounds
    return (values_N >= lower) & (values_N <= upper)


def is_not_vetoed(inputs: LossInputs, veto_below: float) -> Tensor:
    """False for every token of a sequence that has a token with a ratio below `veto_below`."""
    ratio_N = torch.where(inputs.mask_N.bool(), _log_ratio(inputs).exp(), torch.ones_like(inputs.mask_N))
    return (min_by(ratio_N, inputs.sequence_N, inputs.num_sequences) >= veto_below)[inputs.sequence_N]


WEIGHT, WEIGHT_SQUARED = "correction/weight", "correction/weight_squared"


def with_effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """Add mean(w)^2 / mean(w^2) to the metrics: the share of the batch that counts once weights are applied (Kish 1965)."""
    if not metrics.get(WEIGHT_SQUARED):
        return metrics
    return metrics | {"correction/effective_sample_size": metrics[WEIGHT] ** 2 / metrics[WEIGHT_SQUARED]}


def _log_ratio(inputs: LossInputs) -> Tensor:
    return (inputs.anchor_logprobs_N - inputs.sampler_logprobs_N).detach()
