"""Sums, means and spreads of values by the number of the group (sequence, turn, domain) each belongs to. No Python loops
over groups. Shapes: X values, G groups."""

import torch
from torch import Tensor


def sum_by(values_X: Tensor, group_X: Tensor, num_groups: int) -> Tensor:
    """Sum of each group (G)."""
    return values_X.new_zeros(num_groups).index_add(0, group_X, values_X)


def count_by(group_X: Tensor, num_groups: int, like: Tensor) -> Tensor:
    """Number of values of each group (G), in the dtype of `like`."""
    return sum_by(torch.ones_like(group_X, dtype=like.dtype), group_X, num_groups)


def mean_by(values_X: Tensor, group_X: Tensor, num_groups: int) -> Tensor:
    """Mean of each group (G); empty groups get 0."""
    return sum_by(values_X, group_X, num_groups) / count_by(group_X, num_groups, values_X).clamp(min=1)


def masked_mean_by(values_X: Tensor, mask_X: Tensor, group_X: Tensor, num_groups: int) -> Tensor:
    """Mean of each group's unmasked values (G); a group without any gets 0."""
    kept_X = torch.where(mask_X.bool(), values_X, torch.zeros_like(values_X))
    return sum_by(kept_X, group_X, num_groups) / sum_by(mask_X, group_X, num_groups).clamp(min=1)


def max_by(values_X: Tensor, group_X: Tensor, num_groups: int) -> Tensor:
    """Largest value of each group (G); empty groups get 0."""
    return values_X.new_zeros(num_groups).scatter_reduce(0, group_X, values_X, "amax", include_self=False)


def min_by(values_X: Tensor, group_X: Tensor, num_groups: int) -> Tensor:
    """Smallest value of each group (G); empty groups get 0."""
    return values_X.new_zeros(num_groups).scatter_reduce(0, group_X, values_X, "amin", include_self=False)


def centred_by(values_X: Tensor, group_X: Tensor, num_groups: int) -> Tensor:
    """Value minus the mean of its group (X); exactly zero where a group's values are all equal."""
    centred_X = values_X - mean_by(values_X, group_X, num_groups)[group_X]
    # A mean of equal numbers may differ from them by rounding; an uninformative group must have no gradient at all.
    spread_G = max_by(values_X, group_X, num_groups) - min_by(values_X, group_X, num_groups)
    return torch.where(spread_G[group_X] == 0, torch.zeros_like(centred_X), centred_X)


def std_by(values_X: Tensor, group_X: Tensor, num_groups: int) -> Tensor:
    """Unbiased standard deviation of each group (G); a group of one gets 0."""
    squares_G = sum_by(centred_by(values_X, group_X, num_groups).square(), group_X, num_groups)
    return (squares_G / (count_by(group_X, num_groups, values_X) - 1).clamp(min=1)).sqrt()


def number_pairs(first_X: Tensor, second_X: Tensor) -> tuple[Tensor, int]:
    """Number each distinct pair, which makes groups within groups; return the numbers (X) and how many there are."""
    pairs_G2, number_X = torch.unique(torch.stack([first_X, second_X], dim=1), dim=0, return_inverse=True)
    return number_X, len(pairs_G2)


def last_of(group_X: Tensor, num_groups: int) -> Tensor:
    """Index of the last value of every group (G)."""
    places_X = torch.arange(len(group_X), device=group_X.device)
    return places_X.new_zeros(num_groups).scatter_reduce(0, group_X, places_X, "amax", include_self=False)


def discounted_sums(values_X: Tensor, group_X: Tensor, num_groups: int, discount: float) -> Tensor:
    """Discounted sum from each value to the end of its group: v_x + discount * v_{x+1} + ... Groups are stored end to end,
    in order of their numbers.

    The loop runs over the longest group's length, on vectors of one value per group.
    """
    if not len(values_X):
        return values_X
    lengths_G = torch.bincount(group_X, minlength=num_groups)
    starts_G = lengths_G.cumsum(0) - lengths_G
    place_X = torch.arange(len(values_X), device=values_X.device) - starts_G[group_X]
    padded_LG = values_X.new_zeros(int(lengths_G.max()), num_groups)
    padded_LG[place_X, group_X] = values_X
    for place in range(len(padded_LG) - 2, -1, -1):
        padded_LG[place] += discount * padded_LG[place + 1]
    return padded_LG[place_X, group_X]
