"""Triton kernel that copies ranges of one flat buffer to many tensors of a GPU in one launch, converting dtypes.

A launch per tensor would take longer than the copies.

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
"""Alignment of offsets and sizes in elements, and of addresses in bytes. The table stores multiples of it, so that the
compiler knows the alignment; otherwise it moves only one element at a time."""
_BLOCK = 4096
"""Elements that one program copies."""
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class FlatCopy(NamedTuple):
    """Contiguous range of a flat buffer, starting at element `start`, and the tensor it is copied to."""

    start: int
    target: Tensor

    @property
    def is_aligned(self) -> bool:
        """True if the copy meets the kernel's alignment, so that it can be part of a `CopyTable`."""
        offsets = (self.start, self.target.numel(), self.target.data_ptr())
        return (
            self.target.dtype in _TRITON_TYPES
            and self.target.is_contiguous()
            and not any(offset % UNIT for offset in offsets)
        )


class CopyTable:
    """Aligned copies to one device and dtype, repeatable from any buffer with the same layout.

    table = CopyTable([FlatCopy(0, weight), FlatCopy(4096, bias)])
    table.copy(elements)
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
        self._targets = [copy.target for copy in copies]  # kept alive: the table has only their addresses
        self._columns = torch.tensor(columns, dtype=torch.int64).to(device).unbind()
        self._copy_P = torch.arange(len(copies)).repeat_interleave(torch.tensor(num_programs)).to(device)
        self._triton_type = _TRITON_TYPES[dtype]

    def copy(self, elements: Tensor) -> None:
        """Copy every target's elements from `elements`, a flat tensor of any supported dtype, and convert them."""
        with torch.cuda.device_of(self._copy_P):
            _copy[len(self._copy_P),](elements, self._copy_P, *self._columns, self._triton_type, UNIT, _BLOCK)


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    elements_of,
    copy_of,
    start_of,
    address_of,
    count_of,
    first_program_of,
    triton_type: tl.constexpr,
    unit: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    copy = tl.load(copy_of + program)
    offsets = (program - tl.load(first_program_of + copy)) * block + tl.arange(0, block)
    in_bounds = offsets < tl.load(count_of + copy) * unit
    elements = tl.load(elements_of + tl.load(start_of + copy) * unit + offsets, mask=in_bounds)
    target = (tl.load(address_of + copy) * unit).to(tl.pointer_type(triton_type))
    tl.store(target + offsets, elements.to(triton_type), mask=in_bounds)
