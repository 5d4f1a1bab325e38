"""Estimates of KL(policy || other) from the logprobs of sampled tokens, by the names they go by (Schulman 2020,
"Approximating KL divergence"), and the exact sum over the vocabulary. d = log(policy / other). Shapes: N tokens, V
vocabulary."""

from collections.abc import Callable

import torch
from torch import Tensor

KlEstimatorFn = Callable[[Tensor, Tensor], Tensor]
"""Function from the logprobs of a policy and of another, for the same tokens, to a divergence per token."""

MAX_LOG_RATIO = 10.0
"""Bound of |log ratio|. A ratio beyond exp of this says only "far apart"; the bound keeps one token from dominating a
batch."""


def k1(policy_logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """Estimate d: unbiased, may be negative. As a loss its expected gradient is zero: use it in rewards and advantages."""
    return policy_logprobs_N - other_logprobs_N


def k2(policy_logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """Estimate d^2 / 2: biased, never negative; as a loss on fresh samples its expected gradient is exactly that of the
    KL."""
    return (policy_logprobs_N - other_logprobs_N).square() / 2


def k3(policy_logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """Estimate exp(-d) + d - 1: unbiased, never negative, low variance."""
    log_ratio_N = (policy_logprobs_N - other_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(-log_ratio_N) + log_ratio_N - 1


def absolute(policy_logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """Distance |d|: how far apart, in either direction."""
    return (policy_logprobs_N - other_logprobs_N).abs()


def full(policy_logprobs_NV: Tensor, other_logprobs_NV: Tensor) -> Tensor:
    """Exact KL, summed over the vocabulary. The scorer computes it chunk by chunk; this is its definition."""
    return (policy_logprobs_NV.exp() * (policy_logprobs_NV - other_logprobs_NV)).sum(-1)
