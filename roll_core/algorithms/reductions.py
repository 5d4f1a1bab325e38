"""Reductions of token losses to one number, over global denominators, so that no way of splitting a batch changes the sum. A
token whose mask is 0 contributes neither value nor gradient, in every mode."""

import torch
from torch import Tensor

from roll_core.algorithms.grouping import count_by, sum_by
from roll_core.algorithms.inputs import LossInputs


def token_mean(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Mean over all tokens of the batch; every token weighs the same (DAPO, arXiv 2503.14476)."""
    return _kept(values_N, inputs).sum() / inputs.global_tokens


def sequence_mean_token_sum(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Sum over each sequence's tokens, mean over sequences: the policy gradient as it is derived."""
    return _kept(values_N, inputs).sum() / inputs.global_sequences


def sequence_mean_token_mean(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Mean over each sequence's tokens, mean over sequences (GRPO as published, arXiv 2402.03300)."""
    lengths_S = count_by(inputs.sequence_N, inputs.num_sequences, values_N)
    sums_S = sum_by(_kept(values_N, inputs), inputs.sequence_N, inputs.num_sequences)
    return (sums_S / lengths_S.clamp(min=1)).sum() / inputs.global_sequences


def fixed_length(values_N: Tensor, inputs: LossInputs, *, length: int) -> Tensor:
    """Sum over each sequence's tokens, divided by one length for all, mean over sequences (Dr.GRPO, arXiv 2503.20783)."""
    return _kept(values_N, inputs).sum() / (inputs.global_sequences * length)


def _kept(values_N: Tensor, inputs: LossInputs) -> Tensor:
    # A product would let an infinite value of a removed token through as not-a-number.
    return torch.where(inputs.mask_N.bool(), values_N, torch.zeros_like(values_N))
