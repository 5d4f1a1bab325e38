"""The safetensors of a Hugging Face folder: read in parts, where a rank needs some of a tensor, and written in shards, by
one or by several ranks. Either way memory holds one shard at most."""

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
"""Held in memory at once, beside the next tensor: three times the largest of those that models of 200B have."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class NamedTensors(Protocol):
    @property
    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """Rows and columns of a tensor; no more than those is read."""
        ...


class TensorsInMemory:
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
    """A folder's shards. They are mapped into memory, one at a time, so that only what is asked for is read."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._mapped: tuple[str, Any] | None = None
        self._file_of = self._find()

    @property
    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        return self._slice(name)[where]

    def _find(self) -> dict[str, str]:
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
    """Which of several that write a folder together this one is. All see all tensors, and write shards in turn."""

    number: int
    of: int


ALONE = WriterRank(0, 1)


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES, turn: WriterRank = ALONE
) -> torch.dtype:
    """Shards of bounded size and, if there are several, their index; answers what numbers they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[str, ...]] = []
    counted = _Counted(tensors)
    with ThreadPoolExecutor(1) as beside:  # others need this one to gather theirs, while it writes
        written: Future[None] | None = None
        for number, together in groupby(_numbered(counted, shard_bytes), key=lambda each: each[0]):
            if number % turn.of != turn.number:
                shards.append(tuple(name for _, name, _ in together))
                continue
            if written is not None:
                written.result()
            shard = {name: tensor.detach().cpu().contiguous() for _, name, tensor in together}
            shards.append(tuple(shard))
            written = beside.submit(save_file, shard, folder / _unnumbered(number), {"format": "pt"})
            del shard
        if written is not None:
            written.result()
    for number in range(turn.number, len(shards), turn.of):
        (folder / _unnumbered(number)).rename(folder / _numbered_file(number, len(shards)))
    if turn.number == 0 and len(shards) > 1:
        weight_map = {name: _numbered_file(number, len(shards)) for number, names in enumerate(shards) for name in names}
        index = {"metadata": {"total_size": counted.num_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    return counted.dtype


class _Counted:
    """Tensors that go by, how many bytes they were, and numbers of which kind."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]):
        self._tensors = tensors
        self.num_bytes = 0
        self.dtype = torch.float32

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            self.num_bytes += tensor.nbytes
            self.dtype = tensor.dtype
            yield name, tensor


def _numbered(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[tuple[int, str, Tensor]]:
    """With the number of the shard that each is in. A tensor larger than a shard gets one of its own."""
    number = size = 0
    for name, tensor in tensors:
        if size and size + tensor.nbytes > shard_bytes:
            number, size = number + 1, 0
        size += tensor.nbytes
        yield number, name, tensor


def _unnumbered(number: int) -> str:
    """The name of a shard until it is known how many there are."""
    return f"shard-{number}.safetensors"


def _numbered_file(number: int, of: int) -> str:
    return SINGLE if of == 1 else f"model-{number + 1:05d}-of-{of:05d}.safetensors"
