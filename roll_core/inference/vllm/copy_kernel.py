"""Numbers copied from one memory to many places of a GPU, and rounded on the way, in one launch: a launch for each place
takes longer than the copies.
Shapes: C copies, P programs of the launch.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT = 16
"""Numbers and bytes by whose multiples places are counted here, so that the compiler knows how they are aligned: only then
it moves more than one number at a time."""
_BLOCK = 4096
"""Numbers that one program copies."""
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class FlatCopy(NamedTuple):
    """Numbers in a row, from `start` on, and where they go."""

    start: int
    target: Tensor

    @property
    def is_aligned(self) -> bool:
        """Whether it can be one of many in a launch."""
        places = (self.start, self.target.numel(), self.target.data_ptr())
        return self.target.dtype in _KINDS and self.target.is_contiguous() and not any(place % UNIT for place in places)


class CopyTable:
    """Aligned copies to one device and one kind of number, done as often as wanted from memory that is laid out alike.

    table = CopyTable([FlatCopy(0, weight), FlatCopy(4096, bias)])
    table.copy(numbers)
    """

    def __init__(self, copies: Sequence[FlatCopy]):
        (device,), (dtype,) = {copy.target.device for copy in copies}, {copy.target.dtype for copy in copies}
        num_programs = [triton.cdiv(copy.target.numel(), _BLOCK) for copy in copies]
        columns = (
            [copy.start // UNIT for copy in copies],
            [copy.target.data_ptr() // UNIT for copy in copies],
            [copy.target.numel() // UNIT for copy in copies],
            [*accumulate(num_programs[:-1], initial=0)],
        )
        self._targets = [copy.target for copy in copies]  # of which the table has addresses only
        self._columns = torch.tensor(columns, dtype=torch.int64).to(device).unbind()
        self._copy_P = torch.arange(len(copies)).repeat_interleave(torch.tensor(num_programs)).to(device)
        self._kind = _KINDS[dtype]

    def copy(self, numbers: Tensor) -> None:
        with torch.cuda.device_of(self._copy_P):
            _copy[len(self._copy_P),](numbers, self._copy_P, *self._columns, self._kind, UNIT, _BLOCK)


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    numbers_of,
    copy_of,
    start_of,
    address_of,
    count_of,
    first_program_of,
    kind: tl.constexpr,
    unit: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    copy = tl.load(copy_of + program)
    places = (program - tl.load(first_program_of + copy)) * block + tl.arange(0, block)
    is_there = places < tl.load(count_of + copy) * unit
    numbers = tl.load(numbers_of + tl.load(start_of + copy) * unit + places, mask=is_there)
    target = (tl.load(address_of + copy) * unit).to(tl.pointer_type(kind))
    tl.store(target + places, numbers.to(kind), mask=is_there)
