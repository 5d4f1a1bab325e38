"""Slices of Megatron's global tensors, which the ranks hold, from and to Hugging Face tensors.

`fill` reads what a rank holds; `TensorGatherer` gives every rank the whole tensors, a bounded number of bytes at a time. Both see
a layout as slices only. Rows are along the first dimension of a tensor; a vector has rows and no columns.
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
    """Of a global tensor.

    Example: TensorSlice("decoder.layers.mlp.linear_fc2.weight", index=(3,), global_shape=(64, 96), start=(0, 48), shape=(64, 48))
    """

    key: str
    index: tuple[int, ...]
    """Which of the tensors that are stacked under this key: the layer, and the expert."""
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def columns(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start[1:], self.shape[1:], strict=True))


@dataclass(frozen=True, eq=False)
class Shard:
    """A slice that this rank holds: some rows of a parameter, all of them but for gate and up, which are one."""

    slice: TensorSlice
    parameter: nn.Parameter
    first_row: int
    is_main: bool
    """Of the ranks that hold the same slice one gives it to the others."""

    def within(self, values: Tensor) -> Tensor:
        """The slice of something that is as large as the parameter: its data, its gradient."""
        return values[self.first_row : self.first_row + self.slice.shape[0]]


Values = Callable[[nn.Parameter], Tensor]
"""What of a parameter is meant, of its shape: `lambda parameter: parameter.data`"""


@torch.no_grad()
def fill(shards: Sequence[Shard], names: MegatronNames, tensors: NamedTensors) -> None:
    """Read the slices that this rank holds, and nothing else."""
    _check_names(names, tensors)
    for shard in shards:
        _check_shapes(names, shard.slice, tensors)
        data = shard.within(shard.parameter.data)
        filled = 0
        for name, theirs, ours in _overlaps(names, shard.slice):
            data[ours].copy_(tensors.read(name, (theirs, *shard.slice.columns)))
            filled = ours.stop
        data[filled:].zero_()  # padding of the vocabulary


class TensorGatherer:
    """Hugging Face tensors from the slices of all ranks, in the order of the model's parameters. Beside its shards a rank
    has in memory a bucket, of `bucket_bytes` or one tensor, and a message, of a quarter of a bucket."""

    def __init__(self, shards: Sequence[Shard], names: MegatronNames, bucket_bytes: int = BUCKET_BYTES):
        self._bucket_bytes = bucket_bytes
        self._message_numbers = bucket_bytes // 16
        self._any_parameter = shards[0].parameter
        self._mine = {shard.slice: shard for shard in shards if shard.is_main}
        wholes = _wholes(_of_all_ranks(list(self._mine)), names, self._message_numbers)
        self._wholes = sorted(wholes, key=lambda whole: whole.place)

    def tensors(self, values: Values, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, as numbers of this kind; every rank iterates, every rank sees the same."""
        for bucket in in_batches(self._wholes, lambda whole: whole.numel * dtype.itemsize, self._bucket_bytes):
            yield from self._gather(bucket, values, dtype)

    def _gather(self, bucket: list["_Whole"], values: Values, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        like = torch.empty(0, dtype=dtype, device=values(self._any_parameter).device)
        tensors = {name: like.new_empty(shape) for whole in bucket for name, shape in whole.shapes.items()}
        held = sorted((each for whole in bucket for each in whole.held), key=lambda each: each.rank)
        for rank, theirs in groupby(held, key=lambda each: each.rank):
            for message in in_batches(theirs, lambda each: prod(each.slice.shape), self._message_numbers):
                self._receive(rank, message, values, like, tensors)
        for name in list(tensors):
            yield name, tensors.pop(name)

    @torch.no_grad()
    def _receive(self, rank: int, message: list["_Held"], values: Values, like: Tensor, tensors: dict[str, Tensor]) -> None:
        """Some of what one rank holds, into its place."""
        sizes = [prod(each.slice.shape) for each in message]
        flat = like.new_empty(sum(sizes))
        parts = [part.view(each.slice.shape) for part, each in zip(flat.split(sizes), message, strict=True)]
        if rank == ranks.rank():
            for each, part in zip(message, parts, strict=True):
                shard = self._mine[each.of]
                part.copy_(shard.within(values(shard.parameter))[each.first_row :][: len(part)])
        if ranks.world_size() > 1:
            dist.broadcast(flat, rank)
        for each, part in zip(message, parts, strict=True):
            for name, theirs, ours in each.overlaps:
                tensors[name][(theirs, *each.slice.columns)].copy_(part[ours])


class _Overlap(NamedTuple):
    """Some rows of a Hugging Face tensor, and which rows of a slice they are."""

    name: str
    theirs: slice
    ours: slice


@dataclass(frozen=True)
class _Held:
    """Rows of a slice that a rank holds, few enough for a message, which are a slice, too."""

    rank: int
    of: TensorSlice
    slice: TensorSlice
    overlaps: tuple[_Overlap, ...]

    @property
    def first_row(self) -> int:
        return self.slice.start[0] - self.of.start[0]


@dataclass(frozen=True)
class _Whole:
    """A global tensor: which Hugging Face tensors it is, and which ranks hold it."""

    place: int
    shapes: dict[str, tuple[int, ...]]
    held: tuple[_Held, ...]

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())


def _wholes(held: list[list[TensorSlice]], names: MegatronNames, message_numbers: int) -> Iterator[_Whole]:
    together: dict[tuple[str, tuple[int, ...]], list[tuple[int, TensorSlice]]] = {}
    for rank, slices in enumerate(held):
        for each in slices:
            together.setdefault((each.key, each.index), []).append((rank, each))
    place_of = {name: place for place, name in enumerate(names.hugging_face)}
    for (key, index), pieces in together.items():
        global_shape = pieces[0][1].global_shape
        found = sum(prod(each.shape) for _, each in pieces)
        assert found == prod(global_shape), f"{key} {index} has {prod(global_shape)} numbers, of which ranks hold {found}"
        shapes = _shapes(names, pieces[0][1])
        of_ranks = tuple(
            _Held(rank, each, rows, tuple(_overlaps(names, rows)))
            for rank, each in pieces
            for rows in _cut(each, message_numbers)
        )
        yield _Whole(place_of[next(iter(shapes))], shapes, of_ranks)


def _cut(whole: TensorSlice, message_numbers: int) -> Iterator[TensorSlice]:
    """Into as many rows as a message takes; at least one."""
    height = max(1, message_numbers // prod(whole.shape[1:]))
    for first in range(0, whole.shape[0], height):
        start, shape = (whole.start[0] + first, *whole.start[1:]), (min(height, whole.shape[0] - first), *whole.shape[1:])
        yield replace(whole, start=start, shape=shape)


def _overlaps(names: MegatronNames, piece: TensorSlice) -> Iterator[_Overlap]:
    begin, end = piece.start[0], piece.start[0] + piece.shape[0]
    for part in names.parts(piece.key, piece.index, piece.global_shape[0]):
        start, stop = max(begin, part.start), min(end, part.stop)
        if start < stop:
            first = part.first + start - part.start
            yield _Overlap(part.name, slice(first, first + stop - start), slice(start - begin, stop - begin))


def _check_names(names: MegatronNames, tensors: NamedTensors) -> None:
    """A tensor without a place would be lost without a word."""
    there, wanted = set(tensors.names), set(names.hugging_face)
    if missing := sorted(wanted - there):
        raise RollError(f"model.path: {missing[0]} is not there ({len(missing)} tensors are missing)")
    surplus = sorted(there - wanted - {"lm_head.weight"})  # that of a tied model is its embedding
    if surplus:
        raise RollError(f"model.path: megatron has no place for {surplus[0]} (nor for {len(surplus) - 1} others)")


def _check_shapes(names: MegatronNames, piece: TensorSlice, tensors: NamedTensors) -> None:
    for name, wanted in _shapes(names, piece).items():
        if (found := tensors.shape(name)) != wanted:
            raise RollError(f"model.path: {name} is {list(found)}, and by the model's config {list(wanted)}")


def _shapes(names: MegatronNames, piece: TensorSlice) -> dict[str, tuple[int, ...]]:
    """Of the whole Hugging Face tensors that a slice has some of."""
    parts = names.parts(piece.key, piece.index, piece.global_shape[0])
    return {part.name: (part.first + part.stop - part.start, *piece.global_shape[1:]) for part in parts}  # the last counts


def _of_all_ranks(mine: list[TensorSlice]) -> list[list[TensorSlice]]:
    if ranks.world_size() == 1:
        return [mine]
    held: list[list[TensorSlice]] = [[] for _ in range(ranks.world_size())]
    dist.all_gather_object(held, mine)
    return held
