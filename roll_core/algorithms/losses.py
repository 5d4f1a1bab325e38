"""Losses on trained tokens. Each is pure: tensors in, one scalar and some sums out. Shapes as in `inputs.py`."""

from collections.abc import Callable

import torch
from torch import Tensor

from roll_core.algorithms.divergences import MAX_LOG_RATIO, k3
from roll_core.algorithms.inputs import LossInputs, LossOutputs

Reduction = Callable[[Tensor, LossInputs], Tensor]


def clipped_policy_gradient(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    kl_coefficient: float,
    entropy_coefficient: float,
    reduce: Reduction,
) -> LossOutputs:
    """PPO's clipped objective with separate bounds, plus a KL penalty to the reference and an entropy bonus."""
    log_ratio_N = (inputs.policy_logprobs_N - inputs.anchor_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    clipped_ratio_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    gain_N = torch.minimum(ratio_N * inputs.advantages_N, clipped_ratio_N * inputs.advantages_N)
    loss = reduce(-gain_N, inputs)
    sums = {
        "update/clip_fraction": _masked_sum(clipped_ratio_N * inputs.advantages_N < ratio_N * inputs.advantages_N, inputs),
        "update/entropy": _masked_sum(inputs.entropies_N, inputs),
        "update/kl_to_anchor": _masked_sum(k3(inputs.policy_logprobs_N, inputs.anchor_logprobs_N), inputs),
        "update/kl_to_sampler": _masked_sum(k3(inputs.policy_logprobs_N, inputs.sampler_logprobs_N), inputs),
    }
    if entropy_coefficient:
        loss = loss - entropy_coefficient * reduce(inputs.entropies_N, inputs)
    if inputs.reference_logprobs_N is not None:
        kl_N = k3(inputs.policy_logprobs_N, inputs.reference_logprobs_N)
        loss = loss + kl_coefficient * reduce(kl_N, inputs)
        sums["update/kl_to_reference"] = _masked_sum(kl_N, inputs)
    return LossOutputs(loss, sums)


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """Negative log-likelihood, mean over tokens: the warm start and supervised fine-tuning."""
    loss = (-inputs.policy_logprobs_N * inputs.mask_N).sum() / inputs.global_tokens
    return LossOutputs(loss, {"warm_start/entropy": _masked_sum(inputs.entropies_N, inputs)})


def _masked_sum(values_N: Tensor, inputs: LossInputs) -> Tensor:
    return (values_N.detach() * inputs.mask_N).sum()
