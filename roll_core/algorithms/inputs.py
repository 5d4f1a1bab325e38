"""What advantages and losses are given, and what they answer.

Shapes: S sequences, N trained tokens of those sequences laid end to end (no padding exists here).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """Rewards of a whole iteration.

    Example (two groups of two, completions of 1, 2, 1 and 1 tokens): rewards_S=[1., 0., 1., 1.], group_S=[0, 0, 1, 1],
    sequence_N=[0, 1, 1, 2, 3]
    """

    rewards_S: Tensor
    group_S: Tensor
    sequence_N: Tensor


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of one micro-batch. The global counts are those of the whole batch of the optimizer step.

    `mask_N` is 1 for tokens that count and 0 for those a correction has removed; removed tokens have no gradient, but the
    global counts still include them, so that removing a token does not strengthen the others.
    """

    policy_logprobs_N: Tensor
    entropies_N: Tensor
    anchor_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    reference_logprobs_N: Tensor | None
    advantages_N: Tensor
    mask_N: Tensor
    sequence_N: Tensor
    num_sequences: int
    global_tokens: float
    global_sequences: float


@dataclass(frozen=True)
class LossOutputs:
    """`loss` summed over all micro-batches of all ranks is the loss of the batch.

    `metric_sums` are sums over this micro-batch's tokens; whoever reports divides by the number of tokens summed.
    """

    loss: Tensor
    metric_sums: dict[str, Tensor]


AdvantageFn = Callable[[AdvantageInputs], Tensor]
LossFn = Callable[[LossInputs], LossOutputs]
