"""Triton kernel for `digests.mix`: one pass over GPU memory and one launch for all tensors.

Plain torch makes a dozen passes, and a launch per tensor takes longer than the pass itself.

Shapes: T tensors, P programs of the launch.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
"""Elements that one program mixes: few enough for its registers, and enough that the atomic adds do not matter."""
_INTEGER_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def mix_on_gpu(tensors: Sequence[Tensor], position_factor: int, first_factor: int, second_factor: int) -> Tensor:
    """Mix each tensor into one 64-bit integer [T]. All tensors must be on one device and have one element size."""
    (device,), (size,) = {tensor.device for tensor in tensors}, {tensor.itemsize for tensor in tensors}
    dense = [tensor.contiguous() for tensor in tensors]  # no copy if it is contiguous already
    num_programs = [triton.cdiv(tensor.numel(), _BLOCK) for tensor in dense]
    columns = (
        [t.data_ptr() for t in dense],
        [t.numel() for t in dense],
        [*accumulate(num_programs[:-1], initial=0)],
        num_programs,
    )
    address_T, count_T, first_program_T, num_programs_T = torch.tensor(columns, dtype=torch.int64).to(device)
    tensor_P = torch.repeat_interleave(num_programs_T, output_size=sum(num_programs))
    total_T = torch.zeros_like(count_T)
    with torch.cuda.device_of(total_T):
        _mix[len(tensor_P),](
            tensor_P,
            address_T,
            count_T,
            first_program_T,
            total_T,
            _INTEGER_TYPES[size],
            position_factor,
            first_factor,
            second_factor,
            _BLOCK,
        )
    return total_T


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    tensor_of,
    address_of,
    count_of,
    first_program_of,
    total_of,
    integer_type: tl.constexpr,
    position_factor: tl.constexpr,
    first_factor: tl.constexpr,
    second_factor: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    positions = (program - tl.load(first_program_of + tensor)) * block + tl.arange(0, block).to(tl.int64)
    in_bounds = positions < tl.load(count_of + tensor)
    elements_of = tl.load(address_of + tensor).to(tl.pointer_type(integer_type))
    elements = tl.load(elements_of + positions, mask=in_bounds, other=0).to(tl.int64)
    elements += positions * position_factor
    elements = (elements ^ (elements >> 29)) * first_factor
    elements = (elements ^ (elements >> 32)) * second_factor
    tl.atomic_add(total_of + tensor, tl.sum(tl.where(in_bounds, elements ^ (elements >> 27), 0), axis=0), sem="relaxed")
