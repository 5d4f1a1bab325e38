"""Mismatch statistics: the trainer's against the sampler's logprobs of the same tokens. Pure; `roll_core.training.mismatch`
calls it.

All statistics add up over ranks, tails included: quantiles are read off a histogram. d = log(trainer / sampler), clamped to
`MAX_LOG_RATIO`. Shapes: N tokens, B bins of the histogram.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_core.algorithms.divergences import MAX_LOG_RATIO, k3

BIN_WIDTH = 0.001
"""Width of the bins of d, which are centred at multiples of it: a quantile of the ratio is right to 0.05 %."""
BINS_EACH_SIDE = round(MAX_LOG_RATIO / BIN_WIDTH)
"""Number of bins on each side of d = 0."""


@dataclass(frozen=True)
class MismatchSums:
    """Mismatch statistics of the tokens of a part of a batch. For the whole batch, add `sums` and `counts_B`, and take the
    larger `extremes`.

    Example (d of 0 and of -0.7): sums=[2., 0.7, 0.1966, 1.] (tokens, |d|, KL, tokens off by more than a factor of two),
    counts_B=[..., 1., ..., 1., ...], extremes=[0., 0.7] (the largest d and the largest -d)
    """

    sums: Tensor
    counts_B: Tensor
    extremes: Tensor


def measure_mismatch(log_ratio_N: Tensor) -> MismatchSums:
    """Measure the mismatch of tokens from their d. A d that is not a number counts as `MAX_LOG_RATIO`."""
    d_N = log_ratio_N.double().nan_to_num(nan=MAX_LOG_RATIO).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # The tokens are the sampler's: k3 is an unbiased KL(sampler || trainer).
    sums = [torch.ones_like(d_N), d_N.abs(), k3(torch.zeros_like(d_N), d_N), (d_N.abs() > math.log(2)).double()]
    bin_N = (d_N / BIN_WIDTH).round().long() + BINS_EACH_SIDE
    nothing_seen = d_N.new_full((1,), -MAX_LOG_RATIO)
    return MismatchSums(
        sums=torch.stack([each_N.sum() for each_N in sums]),
        counts_B=torch.bincount(bin_N, minlength=2 * BINS_EACH_SIDE + 1).double(),
        extremes=torch.stack([torch.cat([side_N, nothing_seen]).max() for side_N in (d_N, -d_N)]),
    )


def mismatch_metrics(mismatch: MismatchSums) -> dict[str, float]:
    """Metrics of the whole batch, by name without their area; empty if there is no token."""
    tokens, absolute, kl, off = mismatch.sums.tolist()
    if not tokens:
        return {}
    largest, largest_negative = mismatch.extremes.tolist()
    return {
        "mean": absolute / tokens,
        "max": max(largest, largest_negative),
        "kl": kl / tokens,
        "ratio_min": math.exp(-largest_negative),
        "ratio_p01": math.exp(_quantile(mismatch.counts_B, 0.01)),
        "ratio_p99": math.exp(_quantile(mismatch.counts_B, 0.99)),
        "ratio_max": math.exp(largest),
        "share_off": off / tokens,
    }


def _quantile(counts_B: Tensor, share: float) -> float:
    """Smallest d that this share of the tokens does not exceed, to the nearest bin."""
    reached_B = counts_B.cumsum(0)
    place = torch.searchsorted(reached_B, share * reached_B[-1])
    return (int(place) - BINS_EACH_SIDE) * BIN_WIDTH
