"""Advantages: how much better than expected each trained token did. Shapes as in `inputs.py`; G groups."""

import torch
from torch import Tensor

from roll_core.algorithms.inputs import AdvantageInputs

STD_EPSILON = 1e-6
"""Keeps nearly equal rewards from being blown up; far below any difference a reward means."""


def group_relative(inputs: AdvantageInputs) -> Tensor:
    """Each reward minus the mean of its group (GRPO without scaling, Dr.GRPO); equal rewards give exactly zero."""
    return _centred(inputs)[inputs.sequence_N]


def group_normalized(inputs: AdvantageInputs) -> Tensor:
    """Each reward minus the mean of its group, over the group's (unbiased) standard deviation: GRPO's outcome advantage."""
    centred_S = _centred(inputs)
    sizes_G, squares_G = _sizes(inputs), _sum_by_group(centred_S.square(), inputs)
    std_G = (squares_G / (sizes_G - 1).clamp(min=1)).sqrt()
    return (centred_S / (std_G[inputs.group_S] + STD_EPSILON))[inputs.sequence_N]


def _centred(inputs: AdvantageInputs) -> Tensor:
    means_G = _sum_by_group(inputs.rewards_S, inputs) / _sizes(inputs)
    centred_S = inputs.rewards_S - means_G[inputs.group_S]
    # A mean of equal numbers may differ from them by rounding; an uninformative group must not pull the policy at all.
    return torch.where(_spread(inputs)[inputs.group_S] == 0, torch.zeros_like(centred_S), centred_S)


def _spread(inputs: AdvantageInputs) -> Tensor:
    empty_G = inputs.rewards_S.new_zeros(int(inputs.group_S.max()) + 1)
    highest_G = empty_G.scatter_reduce(0, inputs.group_S, inputs.rewards_S, "amax", include_self=False)
    lowest_G = empty_G.scatter_reduce(0, inputs.group_S, inputs.rewards_S, "amin", include_self=False)
    return highest_G - lowest_G


def _sizes(inputs: AdvantageInputs) -> Tensor:
    return _sum_by_group(torch.ones_like(inputs.rewards_S), inputs)


def _sum_by_group(values_S: Tensor, inputs: AdvantageInputs) -> Tensor:
    empty_G = values_S.new_zeros(int(inputs.group_S.max()) + 1)
    return empty_G.index_add(0, inputs.group_S, values_S)
