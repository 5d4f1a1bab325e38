"""Checkpoints of Megatron models in torch.distributed.checkpoint files, readable under any layout.

A global tensor is stored in blocks. A block is a hyper-rectangle of the tensor, with the offsets of its first element. A
rank holds a slice of each parameter, and the optimizer state of a flat range of its elements; a flat range is up to three
hyper-rectangles of a matrix. A loading rank reads the stored blocks that overlap with its own; no rank ever holds a whole
tensor. Padding of the vocabulary is not stored, since it depends on the layout.
"""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from roll_core.errors import RollError
from roll_core.models.megatron_names import MegatronNames
from roll_core.training.checkpoint_reader import load_checkpoint
from roll_core.weights.shards import TensorSlice

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Hyper-rectangle of a tensor: offsets of its first element, and its sizes."""
PROGRESS = "progress"
"""Checkpoint entry that holds the `Progress`."""


class Progress(NamedTuple):
    """Optimizer steps so far, and how many of them were applied: a step whose gradient is not finite is counted, but not
    applied."""

    steps: int
    applied_steps: int


@dataclass(frozen=True, eq=False)
class Block:
    """Hyper-rectangle of a global tensor, with its values.

    Example: Block("exp_avg/decoder.layers.mlp.linear_fc2.weight/3", (64, 96), start=(0, 48), values=<64 x 48>)
    """

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    values: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Offsets and sizes, in the form torch.distributed.checkpoint needs."""
        return ChunkStorageMetadata(offsets=torch.Size(self.start), sizes=self.values.shape)

    @property
    def index(self) -> MetadataIndex:
        """Key of the block in torch.distributed.checkpoint."""
        return MetadataIndex(self.name, torch.Size(self.start))


def blocks_of(kind: str, piece: TensorSlice, names: MegatronNames, values: Tensor, start: int, stop: int) -> Iterator[Block]:
    """Yield the blocks of elements `start` to `stop` of a slice, without vocabulary padding. `values` holds these elements,
    flat. `kind` is the first part of the blocks' names: "weight", or the name of an optimizer state."""
    rows = names.row_ranges(piece.key, piece.index, piece.global_shape[0])[-1].stop
    name = "/".join([kind, piece.key, *map(str, piece.index)])
    inside = min(stop, max(0, rows - piece.start[0]) * prod(piece.shape[1:]))
    for begin, sizes in boxes(piece.shape, start, inside):
        first = sum(place * prod(piece.shape[axis + 1 :]) for axis, place in enumerate(begin)) - start
        place = tuple(offset + within for offset, within in zip(piece.start, begin, strict=True))
        yield Block(name, (rows, *piece.global_shape[1:]), place, values[first : first + prod(sizes)].view(sizes))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Split a flat range of a tensor into contiguous hyper-rectangles.

    Example: list(boxes((4, 10), 7, 23)) == [((0, 7), (1, 3)), ((1, 0), (1, 10)), ((2, 0), (1, 3))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    size = prod(shape[1:])
    first, last = -(-start // size), stop // size  # complete rows, if any
    if first > last:
        yield from _within_row(last, shape, start, stop)
        return
    yield from _within_row(first - 1, shape, start, first * size)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _within_row(last, shape, last * size, stop)


def _within_row(row: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    size = prod(shape[1:])
    for begin, sizes in boxes(shape[1:], start - row * size, stop - row * size):
        yield (row, *begin), (1, *sizes)


def save(folder: Path, blocks: Sequence[Block], progress: Progress, group: dist.ProcessGroup | None) -> None:
    """Write the blocks together with all ranks of the group, or alone without a group. A block that several ranks hold is
    written by one of them."""
    dcp.save({}, checkpoint_id=folder, planner=_SavePlanner(blocks, progress), process_group=group, no_dist=group is None)


def load(folder: Path, blocks: Sequence[Block]) -> Progress:
    """Fill blocks, which are slices of stored tensors, from a checkpoint; return its counts of steps. Each rank reads for
    its own blocks only."""
    planner = _LoadPlanner(blocks)
    load_checkpoint({}, folder, planner, no_dist=True)
    return planner.progress


class _SavePlanner(DefaultSavePlanner):
    """Planner that writes blocks instead of a state dict."""

    def __init__(self, blocks: Sequence[Block], progress: Progress):
        super().__init__(flatten_state_dict=False)
        self._blocks = {block.index: block for block in blocks}
        self._progress = progress

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(PROGRESS), WriteItemType.BYTE_IO)]
        for index, block in self._blocks.items():
            properties = TensorProperties.create_from_tensor(block.values)
            data = TensorWriteData(chunk=block.chunk, properties=properties, size=torch.Size(block.global_shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(self._progress).encode())
        return self._blocks[write_item.index].values


class _LoadPlanner(DefaultLoadPlanner):
    """Planner that reads into the values of blocks."""

    def __init__(self, blocks: Sequence[Block]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {block.index: block for block in blocks}
        self.progress = Progress(0, 0)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored_tensors = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for block in self._blocks.values():
            stored = stored_tensors.get(block.name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != block.global_shape:
                raise RollError(f"the checkpoint has no {block.name} of {list(block.global_shape)}: is it of another model?")
            items += create_read_items_for_chunk_list(block.name, stored, [block.chunk])
        nothing = torch.Size((0,))
        progress = MetadataIndex(PROGRESS)
        items.append(ReadItem(LoadItemType.BYTE_IO, progress, nothing, progress, nothing, nothing))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002
        self.progress = Progress(*json.loads(value.getvalue()))

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        found: Any = self._blocks[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)].values
        for axis, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(axis, start, size)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...
