"""Estimates of KL(policy || other) from the logprobs of sampled tokens, by the names they go by (Schulman 2020)."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 10.0
"""exp of more than this says only "far apart"; the bound keeps one token from drowning a batch."""


def k3(policy_logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """exp(-d) + d - 1 for d = log(policy / other): unbiased, never negative, low variance."""
    log_ratio_N = (policy_logprobs_N - other_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(-log_ratio_N) + log_ratio_N - 1
