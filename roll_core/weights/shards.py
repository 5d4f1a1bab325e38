"""Conversion between the tensor slices that Megatron ranks hold and whole Hugging Face tensors.

`load_shards` reads the slices of this rank from a checkpoint. `TensorGatherer` assembles whole tensors on every rank, a
bounded number of bytes at a time. Both know a parallel layout only as slices of global tensors. Rows run along the first
dimension; a vector has rows and no columns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll_core.errors import RollError
from roll_core.models.megatron_names import MegatronNames
from roll_core.models.tensor_files import NamedTensors
from roll_core.weights import ranks
from roll_core.weights.buckets import BUCKET_BYTES, in_batches


@dataclass(frozen=True)
class TensorSlice:
    """Rectangular slice of one of Megatron's global tensors.

    Example:
    TensorSlice("decoder.layers.mlp.linear_fc2.weight", index=(3,), global_shape=(64, 96), start=(0, 48), shape=(64, 48))
    """

    key: str
    """Megatron's name of the global tensor."""
    index: tuple[int, ...]
    """Indices of the tensor among those stacked under this key: the layer, then the expert."""
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    """Offset of the slice in each dimension of the global tensor."""
    shape: tuple[int, ...]

    @property
    def columns(self) -> tuple[slice, ...]:
        """Column ranges of the slice in the global tensor: all dimensions but the first."""
        return tuple(slice(start, start + size) for start, size in zip(self.start[1:], self.shape[1:], strict=True))


@dataclass(frozen=True, eq=False)
class Shard:
    """Slice that this rank holds as rows of a parameter. It is the whole parameter, except that gate and up projections
    are two shards of one fused parameter."""

    slice: TensorSlice
    parameter: nn.Parameter
    first_row: int
    """First row of the parameter that belongs to the slice."""
    is_main: bool
    """True on exactly one of the ranks that hold the same slice; that rank broadcasts it."""

    def view_of(self, values: Tensor) -> Tensor:
        """View of the slice in `values`, which has the parameter's shape: its data or its gradient."""
        return values[self.first_row : self.first_row + self.slice.shape[0]]


ReadValues = Callable[[nn.Parameter], Tensor]
"""Function that returns the tensor to read of a parameter, in its shape. Example: `lambda parameter: parameter.data`"""


@torch.no_grad()
def load_shards(shards: Sequence[Shard], names: MegatronNames, tensors: NamedTensors) -> None:
    """Load this rank's shards from `tensors`, reading only the rows and columns that they cover."""
    _check_names(names, tensors)
    for shard in shards:
        _check_shapes(names, shard.slice, tensors)
        data = shard.view_of(shard.parameter.data)
        filled = 0
        for name, tensor_rows, slice_rows in _overlaps(names, shard.slice):
            data[slice_rows].copy_(tensors.read(name, (tensor_rows, *shard.slice.columns)))
            filled = slice_rows.stop
        data[filled:].zero_()  # vocabulary padding


class TensorGatherer:
    """Gatherer of whole Hugging Face tensors from the slices of all ranks, in the order of the model's parameters.

    Beside its shards a rank holds in memory one bucket, of `bucket_bytes` or a single larger tensor, and one message of
    about a quarter of a bucket.
    """

    def __init__(self, shards: Sequence[Shard], names: MegatronNames, bucket_bytes: int = BUCKET_BYTES):
        self._bucket_bytes = bucket_bytes
        self._message_elements = bucket_bytes // 16
        """Elements in one broadcast: a quarter of a bucket at four bytes each."""
        self._any_parameter = shards[0].parameter
        self._own_shards = {shard.slice: shard for shard in shards if shard.is_main}
        global_tensors = _global_tensors(_all_gather_slices(list(self._own_shards)), names, self._message_elements)
        self._global_tensors = sorted(global_tensors, key=lambda whole: whole.order)

    def tensors(self, values: ReadValues, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by name, converted to `dtype`. Collective: every rank must iterate to the end, and sees the
        same tensors."""
        for bucket in in_batches(self._global_tensors, lambda whole: whole.numel * dtype.itemsize, self._bucket_bytes):
            yield from self._gather(bucket, values, dtype)

    def _gather(self, bucket: list["_GlobalTensor"], values: ReadValues, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        like = torch.empty(0, dtype=dtype, device=values(self._any_parameter).device)
        tensors = {name: like.new_empty(shape) for whole in bucket for name, shape in whole.shapes.items()}
        held = sorted((each for whole in bucket for each in whole.held), key=lambda each: each.rank)
        for rank, theirs in groupby(held, key=lambda each: each.rank):
            for message in in_batches(theirs, lambda each: prod(each.slice.shape), self._message_elements):
                self._receive(rank, message, values, like, tensors)
        for name in list(tensors):
            yield name, tensors.pop(name)

    @torch.no_grad()
    def _receive(
        self, rank: int, message: list["_HeldRows"], values: ReadValues, like: Tensor, tensors: dict[str, Tensor]
    ) -> None:
        """Broadcast one message from the rank that holds its rows, and copy the rows into the tensors."""
        sizes = [prod(each.slice.shape) for each in message]
        flat = like.new_empty(sum(sizes))
        parts = [part.view(each.slice.shape) for part, each in zip(flat.split(sizes), message, strict=True)]
        if rank == ranks.rank():
            for each, part in zip(message, parts, strict=True):
                shard = self._own_shards[each.shard_slice]
                part.copy_(shard.view_of(values(shard.parameter))[each.first_row :][: len(part)])
        if ranks.world_size() > 1:
            dist.broadcast(flat, rank)
        for each, part in zip(message, parts, strict=True):
            for name, tensor_rows, slice_rows in each.overlaps:
                tensors[name][(tensor_rows, *each.slice.columns)].copy_(part[slice_rows])


class _Overlap(NamedTuple):
    """Rows of a Hugging Face tensor that a slice holds, and their rows within the slice."""

    name: str
    tensor_rows: slice
    slice_rows: slice


@dataclass(frozen=True)
class _HeldRows:
    """Rows of a shard's slice that a rank holds, few enough for one message."""

    rank: int
    shard_slice: TensorSlice
    """Slice of the whole shard."""
    slice: TensorSlice
    """Slice of these rows alone."""
    overlaps: tuple[_Overlap, ...]

    @property
    def first_row(self) -> int:
        """Index of the first of these rows within the shard."""
        return self.slice.start[0] - self.shard_slice.start[0]


@dataclass(frozen=True)
class _GlobalTensor:
    """One of Megatron's global tensors: the Hugging Face tensors that it contains and the ranks that hold its rows."""

    order: int
    """Position of its first Hugging Face tensor among the model's parameters."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of its Hugging Face tensors by name."""
    held: tuple[_HeldRows, ...]

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())


def _global_tensors(held: list[list[TensorSlice]], names: MegatronNames, message_elements: int) -> Iterator[_GlobalTensor]:
    """Group the slices of all ranks by global tensor."""
    slices_of: dict[tuple[str, tuple[int, ...]], list[tuple[int, TensorSlice]]] = {}
    for rank, slices in enumerate(held):
        for each in slices:
            slices_of.setdefault((each.key, each.index), []).append((rank, each))
    order_of = {name: order for order, name in enumerate(names.checkpoint_names)}
    for (key, index), pieces in slices_of.items():
        global_shape = pieces[0][1].global_shape
        found = sum(prod(each.shape) for _, each in pieces)
        assert found == prod(global_shape), f"{key} {index} has {prod(global_shape)} numbers, of which ranks hold {found}"
        shapes = _tensor_shapes(names, pieces[0][1])
        of_ranks = tuple(
            _HeldRows(rank, each, rows, tuple(_overlaps(names, rows)))
            for rank, each in pieces
            for rows in _split_rows(each, message_elements)
        )
        yield _GlobalTensor(order_of[next(iter(shapes))], shapes, of_ranks)


def _split_rows(whole: TensorSlice, message_elements: int) -> Iterator[TensorSlice]:
    """Split a slice into slices of as many rows as fit into a message; at least one row each."""
    height = max(1, message_elements // prod(whole.shape[1:]))
    for first in range(0, whole.shape[0], height):
        start, shape = (whole.start[0] + first, *whole.start[1:]), (min(height, whole.shape[0] - first), *whole.shape[1:])
        yield replace(whole, start=start, shape=shape)


def _overlaps(names: MegatronNames, piece: TensorSlice) -> Iterator[_Overlap]:
    """Yield the Hugging Face rows that a slice holds."""
    begin, end = piece.start[0], piece.start[0] + piece.shape[0]
    for part in names.row_ranges(piece.key, piece.index, piece.global_shape[0]):
        start, stop = max(begin, part.start), min(end, part.stop)
        if start < stop:
            first = part.tensor_start + start - part.start
            yield _Overlap(part.name, slice(first, first + stop - start), slice(start - begin, stop - begin))


def _check_names(names: MegatronNames, tensors: NamedTensors) -> None:
    """Raise if a tensor of the model is missing, or if `tensors` has one that would silently not be loaded."""
    there, wanted = set(tensors.names), set(names.checkpoint_names)
    if missing := sorted(wanted - there):
        raise RollError(f"model.path: {missing[0]} is not there ({len(missing)} tensors are missing)")
    surplus = sorted(there - wanted - {"lm_head.weight"})  # a tied model's output head is its embedding
    if surplus:
        raise RollError(f"model.path: megatron has no place for {surplus[0]} (nor for {len(surplus) - 1} others)")


def _check_shapes(names: MegatronNames, piece: TensorSlice, tensors: NamedTensors) -> None:
    """Raise if a Hugging Face tensor of this slice does not have the shape that the model's config implies."""
    for name, wanted in _tensor_shapes(names, piece).items():
        if (found := tensors.shape(name)) != wanted:
            raise RollError(f"model.path: {name} is {list(found)}, and by the model's config {list(wanted)}")


def _tensor_shapes(names: MegatronNames, piece: TensorSlice) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole Hugging Face tensors that a slice overlaps, by name."""
    parts = names.row_ranges(piece.key, piece.index, piece.global_shape[0])
    # The last range of a tensor ends at its last row, and the dict keeps the last.
    return {part.name: (part.tensor_start + part.stop - part.start, *piece.global_shape[1:]) for part in parts}


def _all_gather_slices(mine: list[TensorSlice]) -> list[list[TensorSlice]]:
    """Slices that each rank holds, indexed by rank."""
    if ranks.world_size() == 1:
        return [mine]
    held: list[list[TensorSlice]] = [[] for _ in range(ranks.world_size())]
    dist.all_gather_object(held, mine)
    return held
