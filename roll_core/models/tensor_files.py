"""Reading and writing of the safetensors files of a Hugging Face folder.

Ranks read only the rows and columns that they need. One or several ranks write, in shards. Memory holds one shard at most.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll_core.errors import RollError

SHARD_BYTES = 4 * 10**9
"""Default shard size in bytes, held in memory beside the next tensor: three times the largest tensor of 200B-parameter
models."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""File names of the shard index and of a checkpoint that has a single file."""


class NamedTensors(Protocol):
    """Collection of tensors by name, read in parts."""

    @property
    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """Read some rows and columns of a tensor, and nothing beyond them."""
        ...


class TensorsInMemory:
    """Tensors of a dict as NamedTensors."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    @property
    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        return self._tensors[name][where]


class TensorFiles:
    """Safetensors files of a folder as NamedTensors. Files are memory-mapped one at a time, so only the requested parts
    are read."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._mapped: tuple[str, Any] | None = None
        self._file_of = self._map_names_to_files()

    @property
    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        return self._slice(name)[where]

    def _map_names_to_files(self) -> dict[str, str]:
        """File of each tensor, from the index or from the single file."""
        index = self._folder / INDEX
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        if not (self._folder / SINGLE).is_file():
            raise RollError(f"model.path: {self._folder} has neither {INDEX} nor {SINGLE}")
        return dict.fromkeys(self._shard(SINGLE).keys(), SINGLE)

    def _slice(self, name: str) -> Any:
        return self._shard(self._file_of[name]).get_slice(name)

    def _shard(self, file: str) -> Any:
        if self._mapped is None or self._mapped[0] != file:
            self._mapped = (file, safe_open(self._folder / file, "pt"))
        return self._mapped[1]


class WriterRank(NamedTuple):
    """Rank of one of several processes that write a folder together. All see all tensors; each writes every
    `num_writers`-th shard."""

    rank: int
    num_writers: int


SOLE_WRITER = WriterRank(0, 1)
"""Rank of a process that writes a folder alone."""


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES, writer: WriterRank = SOLE_WRITER
) -> torch.dtype:
    """Write shards of bounded size and, if there are several, their index. Return the dtype of the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[str, ...]] = []
    counted = _CountingTensors(tensors)
    with ThreadPoolExecutor(1) as background:  # while it writes, other ranks need this one for gathering
        written: Future[None] | None = None
        for number, members in groupby(_with_shard_number(counted, shard_bytes), key=lambda each: each[0]):
            if number % writer.num_writers != writer.rank:
                shards.append(tuple(name for _, name, _ in members))
                continue
            if written is not None:
                written.result()
            shard = {name: tensor.detach().cpu().contiguous() for _, name, tensor in members}
            shards.append(tuple(shard))
            written = background.submit(save_file, shard, folder / _temporary_name(number), {"format": "pt"})
            del shard
        if written is not None:
            written.result()
    for number in range(writer.rank, len(shards), writer.num_writers):
        (folder / _temporary_name(number)).rename(folder / _final_name(number, len(shards)))
    if writer.rank == 0 and len(shards) > 1:
        weight_map = {name: _final_name(number, len(shards)) for number, names in enumerate(shards) for name in names}
        index = {"metadata": {"total_size": counted.num_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    return counted.dtype


class _CountingTensors:
    """Pass-through over a stream of tensors that records total bytes and the last dtype."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]):
        self._tensors = tensors
        self.num_bytes = 0
        self.dtype = torch.float32

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            self.num_bytes += tensor.nbytes
            self.dtype = tensor.dtype
            yield name, tensor


def _with_shard_number(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[tuple[int, str, Tensor]]:
    """Yield tensors with the number of the shard that each belongs to. A tensor larger than a shard gets a shard of its
    own."""
    number = size = 0
    for name, tensor in tensors:
        if size and size + tensor.nbytes > shard_bytes:
            number, size = number + 1, 0
        size += tensor.nbytes
        yield number, name, tensor


def _temporary_name(number: int) -> str:
    """File name of a shard until the number of shards is known."""
    return f"shard-{number}.safetensors"


def _final_name(number: int, of: int) -> str:
    return SINGLE if of == 1 else f"model-{number + 1:05d}-of-{of:05d}.safetensors"
