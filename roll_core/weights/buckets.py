"""Tensors packed into flat byte buffers of bounded size: few large transfers, and no second full copy of the model."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

Item = TypeVar("Item")
BUCKET_BYTES = 256 * 1024**2
"""Large enough that per-transfer cost vanishes, small beside any accelerator's memory."""


@dataclass(frozen=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """What lies where in flat bytes. One is like no other: to compare hundreds of entries takes longer than to copy them."""

    entries: tuple[TensorEntry, ...]
    starts: tuple[int, ...]
    """The byte at which each tensor begins."""


@dataclass(frozen=True)
class WeightsBucket:
    """Example: WeightsBucket(entries=(TensorEntry("model.norm.weight", (64,), "float32"),), data=<256 bytes>)"""

    entries: tuple[TensorEntry, ...]
    data: np.ndarray


@dataclass(frozen=True)
class DeviceBucket:
    """Tensors in the memory of a GPU, for a process that sees that GPU: of the memory it carries a handle only."""

    entries: tuple[TensorEntry, ...]
    starts: tuple[int, ...]
    """The byte at which each tensor begins."""
    handle: bytes
    num_bytes: int


@dataclass(frozen=True)
class BroadcastBucket:
    """One whose bytes come through the group that an engine has joined, to all engines at once."""

    entries: tuple[TensorEntry, ...]
    num_bytes: int


Bucket = WeightsBucket | DeviceBucket | BroadcastBucket


def pack(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
) -> Iterator[WeightsBucket]:
    """Buckets in order, as numbers of this kind if one is given; a tensor larger than a bucket gets one of its own."""
    for together in _batches(((name, tensor.to(dtype or tensor.dtype)) for name, tensor in tensors), bucket_bytes):
        entries = tuple(_entry(name, tensor.shape, tensor.dtype) for name, tensor in together)
        yield WeightsBucket(entries, np.concatenate([_bytes_of(tensor) for _, tensor in together]))


def unpack(buckets: Iterable[WeightsBucket | DeviceBucket]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `pack`, in order. Those of a device bucket are views: they last as long as its memory does."""
    for bucket in buckets:
        match bucket:
            case WeightsBucket():
                yield from cut(torch.from_numpy(bucket.data.copy()), bucket.entries)
            case DeviceBucket():
                yield from cut(open_handle(bucket.handle), bucket.entries, bucket.starts)


def cut(flat: Tensor, entries: Sequence[TensorEntry], starts: Sequence[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie in flat bytes, one after another if it is not said where they start: views, unless numbers of
    several kinds leave one askew."""
    for entry, start in zip(entries, starts or starts_of(entries), strict=True):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        part = flat[start : start + _num_bytes(entry)]
        yield entry.name, (part.clone() if start % dtype.itemsize else part).view(dtype).reshape(entry.shape)


def starts_of(entries: Sequence[TensorEntry]) -> tuple[int, ...]:
    """The bytes at which tensors begin that lie one after another."""
    return tuple(accumulate(map(_num_bytes, entries[:-1]), initial=0))


def share_in_place(tensors: Sequence[tuple[str, Tensor]]) -> DeviceBucket:
    """Tensors that lie in one allocation anyway, where they lie: nothing is copied, and they must stay as they are until
    nobody reads them any more."""
    flat = _whole_storage(tensors[0][1])
    assert all(tensor.untyped_storage().data_ptr() == flat.data_ptr() for _, tensor in tensors), "several allocations"
    starts = tuple(int(tensor.storage_offset()) * tensor.itemsize for _, tensor in tensors)
    entries = tuple(_entry(name, tensor.shape, tensor.dtype) for name, tensor in tensors)
    torch.cuda.synchronize(flat.device)
    return DeviceBucket(entries, starts, pickle.dumps(reduce_tensor(flat)), sum(map(_num_bytes, entries)))


def pack_on_device(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[DeviceBucket]:
    """Buckets of `lay_out` on a GPU, for processes that see it."""
    for entries, flat in lay_out(tensors, dtype, bucket_bytes):
        torch.cuda.synchronize(flat.device)
        yield DeviceBucket(entries, starts_of(entries), pickle.dumps(reduce_tensor(_whole_storage(flat))), len(flat))


def lay_out(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[tuple[TensorEntry, ...], Tensor]]:
    """Tensors as numbers of this kind, bucket by bucket in the same memory: a bucket is over when the next is asked for."""
    buffer: Tensor | None = None
    for together in _batches(tensors, bucket_bytes):
        entries = tuple(_entry(name, tensor.shape, dtype) for name, tensor in together)
        size = sum(map(_num_bytes, entries))
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(max(size, bucket_bytes), dtype=torch.uint8, device=together[0][1].device)
        for (_, tensor), (_, place) in zip(together, cut(buffer, entries), strict=True):
            place.copy_(tensor.detach())
        yield entries, buffer[:size]


def open_handle(handle: bytes) -> Tensor:
    """The memory that another process shares."""
    rebuild, arguments = pickle.loads(handle)
    return rebuild(*arguments)


def in_batches(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """As many in a row as are no larger than the limit together; at least one."""
    together: list[Item] = []
    size = 0
    for item in items:
        if together and size + size_of(item) > limit:
            yield together
            together, size = [], 0
        together.append(item)
        size += size_of(item)
    if together:
        yield together


def _batches(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    return in_batches(tensors, lambda named: named[1].nbytes, bucket_bytes)


def _entry(name: str, shape: Iterable[int], dtype: torch.dtype) -> TensorEntry:
    return TensorEntry(name, tuple(shape), str(dtype).removeprefix("torch."))


def _whole_storage(tensor: Tensor) -> Tensor:
    """All bytes of the memory that a tensor is part of: what is in the same has the same handle."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _num_bytes(entry: TensorEntry) -> int:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
