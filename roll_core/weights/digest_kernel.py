"""`digests.mix` in one pass over a GPU's memory, where plain torch makes a dozen, and in one launch for all tensors: one for
each of them takes longer than the pass.
Shapes: T tensors, P programs of the launch.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
"""Numbers that one program mixes: few enough for its registers, and so many that the sums they add to do not matter."""
_AS_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def mix_on_gpu(tensors: Sequence[Tensor], place: int, first: int, second: int) -> Tensor:
    """One number a tensor [T]; they are on one device, and all of one size of numbers."""
    (device,), (size,) = {tensor.device for tensor in tensors}, {tensor.itemsize for tensor in tensors}
    dense = [tensor.contiguous() for tensor in tensors]  # itself, if it is that already
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
            tensor_P, address_T, count_T, first_program_T, total_T, _AS_INTEGERS[size], place, first, second, _BLOCK
        )
    return total_T


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    tensor_of,
    address_of,
    count_of,
    first_program_of,
    total_of,
    kind: tl.constexpr,
    place: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    places = (program - tl.load(first_program_of + tensor)) * block + tl.arange(0, block).to(tl.int64)
    is_there = places < tl.load(count_of + tensor)
    numbers_of = tl.load(address_of + tensor).to(tl.pointer_type(kind))
    numbers = tl.load(numbers_of + places, mask=is_there, other=0).to(tl.int64)
    numbers += places * place
    numbers = (numbers ^ (numbers >> 29)) * first
    numbers = (numbers ^ (numbers >> 32)) * second
    tl.atomic_add(total_of + tensor, tl.sum(tl.where(is_there, numbers ^ (numbers >> 27), 0), axis=0), sem="relaxed")
