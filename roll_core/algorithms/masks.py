"""Masks and weights of trajectories: which are trained on, and how much each counts. True (or 1) keeps. Shapes as in
`inputs.py`."""

import torch
from torch import Tensor

from roll_core.algorithms.grouping import mean_by


def is_whole(truncated_S: Tensor) -> Tensor:
    """False for completions that were cut off: their reward does not say what they would have become."""
    return ~truncated_S


def is_of_use(correct_S: Tensor, group_S: Tensor, *, min_accuracy: float, max_accuracy: float) -> Tensor:
    """False for groups that are too hard (accuracy at most `min_accuracy`) or too easy (at least `max_accuracy`)."""
    accuracy_S = _group_accuracy(correct_S, group_S)
    return (accuracy_S > min_accuracy) & (accuracy_S < max_accuracy)


def is_not_long_and_wrong(correct_S: Tensor, lengths_S: Tensor, *, max_tokens: int) -> Tensor:
    """False for wrong answers longer than `max_tokens`."""
    return correct_S.bool() | (lengths_S <= max_tokens)


def difficulty_weights(correct_S: Tensor, group_S: Tensor, *, easiest: float, hardest: float) -> Tensor:
    """Weight by difficulty: `easiest` for groups that are always right, `hardest` for groups that are never right, linear
    between."""
    return easiest + (hardest - easiest) * (1 - _group_accuracy(correct_S, group_S))


def length_weights(lengths_S: Tensor, *, shortest: float, longest: float) -> Tensor:
    """Weight by length: `shortest` for the shortest completion of the batch, `longest` for the longest, linear between."""
    lengths_S = lengths_S.double()
    low, high = lengths_S.min(), lengths_S.max()
    return shortest + (longest - shortest) * (lengths_S - low) / (high - low).clamp(min=1.0)


def rescaled_to_mean_one(weights_S: Tensor) -> Tensor:
    """Weights rescaled to a mean of 1, so that they change relative importance and not the size of a step. All-zero weights
    stay 0."""
    return weights_S / weights_S.mean() if bool(weights_S.any()) else weights_S


def _group_accuracy(correct_S: Tensor, group_S: Tensor) -> Tensor:
    return mean_by(correct_S.to(torch.float64), group_S, int(group_S.max()) + 1)[group_S]
