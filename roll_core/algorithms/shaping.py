"""Shaping of rewards before they become advantages: normalisation, and penalties for length and for distance from the
reference. Shapes as in `inputs.py`; D domains."""

import torch
from torch import Tensor

from roll_core.algorithms.advantages import STD_EPSILON
from roll_core.algorithms.grouping import centred_by, std_by
from roll_core.config.algorithm.shaping import StatisticsFrom
from roll_core.types.refs import Record


class Moments(Record):
    """Count, mean and sum of squared deviations of all rewards seen so far.

    Example: after rewards 1 and 3, Moments(count=2, mean=2.0, squares=2.0)
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        return (self.squares / max(self.count - 1, 1.0)) ** 0.5

    def with_values(self, values_S: Tensor) -> "Moments":
        """Moments after these values, by Chan's parallel update: the same however the values were batched."""
        added = len(values_S)
        if not added:
            return self
        total, mean = self.count + added, values_S.mean().item()
        delta = mean - self.mean
        squares = self.squares + ((values_S - mean) ** 2).sum().item() + delta**2 * self.count * added / total
        return Moments(count=total, mean=self.mean + delta * added / total, squares=squares)


def normalized(
    rewards_S: Tensor,
    *,
    mean_from: StatisticsFrom,
    std_from: StatisticsFrom,
    group_S: Tensor,
    domain_S: Tensor,
    moments_D: list[Moments],
) -> Tensor:
    """Normalised rewards (reward - mean) / (std + epsilon); mean and std are chosen independently. `moments_D` already
    include this batch."""
    centred_S = _centred(rewards_S, mean_from, group_S, domain_S, moments_D)
    return centred_S / divisors(rewards_S, std_from=std_from, group_S=group_S, domain_S=domain_S, moments_D=moments_D)


def divisors(
    rewards_S: Tensor, *, std_from: StatisticsFrom, group_S: Tensor, domain_S: Tensor, moments_D: list[Moments]
) -> Tensor:
    """Divisors of `normalized`: std + epsilon; 1 where the spread is kept, and where it is zero."""
    if std_from is StatisticsFrom.NONE:
        return torch.ones_like(rewards_S)
    std_S = _std(rewards_S, std_from, group_S, domain_S, moments_D)
    # Equal rewards of a group, seen from another mean, would be blown up a million times.
    return torch.where(std_S == 0, torch.ones_like(std_S), std_S + STD_EPSILON)


def overlong_penalty(lengths_S: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476): 0 up to the buffer, then falling linearly to -1 at the limit."""
    into_buffer_S = lengths_S - (max_tokens - buffer_tokens)
    return -(into_buffer_S / buffer_tokens).clamp(0.0, 1.0)


def adapted_coefficient(
    coefficient: float, *, measured: float, target: float, num_samples: int, horizon: float, max_error: float
) -> float:
    """Next KL coefficient (Ziegler et al., arXiv 1909.08593): raised when the KL is above its target, lowered when below, by
    at most `max_error` of itself every `horizon` samples."""
    error = min(max(measured / target - 1, -max_error), max_error)
    # A batch larger than the horizon must not push the weight below zero.
    return coefficient * (1 + error * min(num_samples / horizon, 1.0))


def _index(source: StatisticsFrom, group_S: Tensor, domain_S: Tensor) -> tuple[Tensor, int]:
    index_S = {
        StatisticsFrom.GROUP: group_S,
        StatisticsFrom.DOMAIN: domain_S,
        StatisticsFrom.BATCH: torch.zeros_like(group_S),
    }[source]
    return index_S, int(index_S.max()) + 1


def _centred(
    rewards_S: Tensor, source: StatisticsFrom, group_S: Tensor, domain_S: Tensor, moments_D: list[Moments]
) -> Tensor:
    match source:
        case StatisticsFrom.NONE:
            return rewards_S
        case StatisticsFrom.RUNNING:
            return rewards_S - rewards_S.new_tensor([moments.mean for moments in moments_D])[domain_S]
        case _:
            return centred_by(rewards_S, *_index(source, group_S, domain_S))


def _std(rewards_S: Tensor, source: StatisticsFrom, group_S: Tensor, domain_S: Tensor, moments_D: list[Moments]) -> Tensor:
    if source is StatisticsFrom.RUNNING:
        return rewards_S.new_tensor([moments.std for moments in moments_D])[domain_S]
    index_S, count = _index(source, group_S, domain_S)
    return std_by(rewards_S, index_S, count)[index_S]
