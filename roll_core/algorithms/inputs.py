"""Inputs and outputs of advantages and losses.

Shapes: S trajectories (in the loss: the sequences of a micro-batch), T turns of those trajectories, N trained tokens of
those turns, all stored end to end in the same order. Neither padding nor observations exist here, so that no function can
forget to mask them. K teachers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """Graded trajectories of a whole iteration.

    `rewards_S` is the total reward of each trajectory, already shaped. `turn_rewards_T` is the part of it that was paid turn
    by turn; `token_rewards_N` (a KL penalty) is paid token by token on top. `state_T` numbers what the policy saw before
    each turn; equal numbers mean the same state only inside one group. `final_values_S` is the value after the last token.

    Example (two groups of two, completions of 1, 2, 1 and 1 tokens, one turn each): rewards_S=[1., 0., 1., 1.],
    group_S=[0, 0, 1, 1], sequence_N=[0, 1, 1, 2, 3], turn_N=[0, 1, 1, 2, 3], sequence_T=[0, 1, 2, 3],
    turn_rewards_T=[0., 0., 0., 0.], state_T=[0, 0, 1, 1], truncated_S=[False, False, True, False]
    """

    rewards_S: Tensor
    group_S: Tensor
    sequence_N: Tensor
    turn_N: Tensor
    sequence_T: Tensor
    turn_rewards_T: Tensor
    state_T: Tensor
    truncated_S: Tensor
    token_rewards_N: Tensor | None = None
    greedy_rewards_S: Tensor | None = None
    values_N: Tensor | None = None
    final_values_S: Tensor | None = None
    sampler_logprobs_N: Tensor | None = None
    teacher_logprobs_KN: Tensor | None = None
    teacher_weights_KN: Tensor | None = None
    """Weight of each teacher for each token; 0 where the problem is not of its domains."""

    @property
    def num_sequences(self) -> int:
        return len(self.rewards_S)

    @property
    def num_turns(self) -> int:
        return len(self.turn_rewards_T)


@dataclass(frozen=True)
class LossInputs:
    """Trained tokens of one micro-batch. The global counts are those of the whole batch of the optimizer step.

    `mask_N` is 1 for tokens that count and 0 for tokens that a correction has removed; these have no gradient, but the
    global counts still include them, so that removing a token does not strengthen the others. `weights_N` multiplies the
    policy's objective, not the KL and entropy terms. `divergences_N` is the full-vocabulary KL to the reference, with
    gradient, where an algorithm asks for it.
    """

    policy_logprobs_N: Tensor
    entropies_N: Tensor
    anchor_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    mask_N: Tensor
    sequence_N: Tensor
    num_sequences: int
    turn_N: Tensor
    num_turns: int
    global_tokens: float
    global_sequences: float
    reference_logprobs_N: Tensor | None = None
    divergences_N: Tensor | None = None
    is_fresh_N: Tensor | None = None
    """True for tokens sampled by the weights in training; for measuring, not for the loss."""


@dataclass(frozen=True)
class ValueInputs:
    """Inputs of the critic's loss: its values now (with gradient), its values before the update, and the returns."""

    values_N: Tensor
    old_values_N: Tensor
    returns_N: Tensor
    mask_N: Tensor
    global_tokens: float


@dataclass(frozen=True)
class LossOutputs:
    """Loss of a micro-batch and sums to report. `loss` summed over all micro-batches of all ranks is the loss of the batch.

    `metric_sums` are sums over this micro-batch's tokens; the backend divides them by the number of tokens summed.
    """

    loss: Tensor
    metric_sums: dict[str, Tensor]


@dataclass(frozen=True)
class TokenLosses:
    """Objective of each token: its loss, and whether clipping changed it."""

    loss_N: Tensor
    clipped_N: Tensor


AdvantageFn = Callable[[AdvantageInputs], Tensor]
Objective = Callable[[LossInputs], TokenLosses]
Reduction = Callable[[Tensor, LossInputs], Tensor]
LossFn = Callable[[LossInputs], LossOutputs]
ValueLossFn = Callable[[ValueInputs], LossOutputs]


def masked_sum(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sum values for metrics. A removed token contributes nothing, even where its value is not a number."""
    return torch.where(mask_N.bool(), values_N.detach().to(mask_N.dtype), torch.zeros_like(mask_N)).sum()
