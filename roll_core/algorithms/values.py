"""Loss of the critic."""

import torch
from torch import Tensor

from roll_core.algorithms.inputs import LossOutputs, ValueInputs, masked_sum


def clipped_value_loss(inputs: ValueInputs, *, value_clip: float | None) -> LossOutputs:
    """Half the squared error to the returns, mean over tokens. With `value_clip` it is the larger of two errors: that of the
    value, and that of the value clamped to within `value_clip` of its value before the update (PPO's reference
    implementation)."""
    error_N = _squared_error(inputs.values_N, inputs)
    worst_N = error_N
    if value_clip is not None:
        near_N = inputs.values_N.clamp(inputs.old_values_N - value_clip, inputs.old_values_N + value_clip)
        worst_N = torch.maximum(error_N, _squared_error(near_N, inputs))
    sums = {
        "critic/clip_fraction": masked_sum(worst_N > error_N, inputs.mask_N),
        "critic/value": masked_sum(inputs.values_N, inputs.mask_N),
        "critic/return": masked_sum(inputs.returns_N, inputs.mask_N),
        "critic/squared_error": masked_sum(error_N, inputs.mask_N),
    }
    return LossOutputs(worst_N.sum() / 2 / inputs.global_tokens, sums)


def _squared_error(values_N: Tensor, inputs: ValueInputs) -> Tensor:
    return torch.where(inputs.mask_N.bool(), values_N - inputs.returns_N, torch.zeros_like(values_N)).square()
