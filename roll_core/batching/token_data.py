"""Data of trained tokens that losses need, for all samples of a batch end to end. Shapes: N trained tokens."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenData:
    """Data of trained tokens; a field that the algorithm does not need is None.

    `turn_N` numbers the turns of the whole batch. `is_fresh_N` is true for tokens of turns that were sampled from their
    beginning by the weights in training, as these are before the first optimizer step.

    Example (two samples, of two trained tokens and of one): sampler_logprobs_N=[-0.1, -0.2, -0.4], turn_N=[0, 0, 1],
    advantages_N=[0.5, 0.5, -0.5], weights_N=[1., 1., 1.], is_fresh_N=[True, True, False]
    """

    sampler_logprobs_N: Tensor
    turn_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    is_fresh_N: Tensor
    anchor_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    returns_N: Tensor | None = None

    def take(self, index_N: Tensor) -> "TokenData":
        """Select the tokens at these indices and number their turns anew, from 0."""
        taken = self._map(lambda tensor: tensor[index_N])
        return replace(taken, turn_N=torch.unique(taken.turn_N, return_inverse=True)[1])

    def to(self, device: torch.device) -> "TokenData":
        """Copy with all tensors on the device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Any) -> "TokenData":
        tensors: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})


def blank_token_data(num_tokens: int) -> TokenData:
    """Token data of zero logprobs and advantages, for tokens that are only imitated or scored."""
    return TokenData(
        sampler_logprobs_N=torch.zeros(num_tokens),
        turn_N=torch.zeros(num_tokens, dtype=torch.long),
        advantages_N=torch.zeros(num_tokens),
        weights_N=torch.ones(num_tokens),
        is_fresh_N=torch.zeros(num_tokens, dtype=torch.bool),
    )
