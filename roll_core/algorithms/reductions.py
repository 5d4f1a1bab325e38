"""From token losses to one number, over global denominators, so that no way of cutting a batch changes the sum."""

import torch
from torch import Tensor

from roll_core.algorithms.inputs import LossInputs


def token_mean(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Every token of the batch weighs the same (DAPO)."""
    return (values_N * inputs.mask_N).sum() / inputs.global_tokens


def sequence_mean_token_sum(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Sum over each sequence's tokens, mean over sequences."""
    return (values_N * inputs.mask_N).sum() / inputs.global_sequences


def sequence_mean_token_mean(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Mean over each sequence's tokens, mean over sequences (GRPO as published)."""
    lengths_S = _sum_by_sequence(torch.ones_like(values_N), inputs)
    sums_S = _sum_by_sequence(values_N * inputs.mask_N, inputs)
    return (sums_S / lengths_S.clamp(min=1)).sum() / inputs.global_sequences


def _sum_by_sequence(values_N: Tensor, inputs: LossInputs) -> Tensor:
    return values_N.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_N, values_N)
