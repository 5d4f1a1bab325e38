"""Losses on pairs of completions, one preferred to the other, for fine-tuning. Shapes: P pairs; logprobs are summed over the
tokens of a completion (mean over them for length-normalised variants; the caller decides)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class PreferenceInputs:
    """Logprobs of the chosen and the rejected completion of each pair, by the policy and by the reference. `global_pairs` is
    the number of pairs in the whole batch of the optimizer step."""

    chosen_logprobs_P: Tensor
    rejected_logprobs_P: Tensor
    chosen_reference_P: Tensor
    rejected_reference_P: Tensor
    global_pairs: float


def direct_preference(inputs: PreferenceInputs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv 2305.18290): -log sigmoid(beta h), h the chosen log ratio minus the rejected one. With label smoothing,
    cDPO (Mitchell 2023): that share of the labels is taken to be wrong."""
    margin_P = beta * _margin(inputs)
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    return loss_P.sum() / inputs.global_pairs


def identity_preference(inputs: PreferenceInputs, *, beta: float) -> Tensor:
    """IPO (arXiv 2310.12036): (h - 1 / (2 beta))^2; the margin tends to a finite value, not to infinity."""
    return (_margin(inputs) - 1 / (2 * beta)).square().sum() / inputs.global_pairs


def preference_accuracy(inputs: PreferenceInputs) -> Tensor:
    """Number of pairs for which the policy prefers the chosen completion more than the reference does."""
    return (_margin(inputs) > 0).to(torch.get_default_dtype()).sum()


def _margin(inputs: PreferenceInputs) -> Tensor:
    chosen_P = inputs.chosen_logprobs_P - inputs.chosen_reference_P
    return chosen_P - (inputs.rejected_logprobs_P - inputs.rejected_reference_P)
