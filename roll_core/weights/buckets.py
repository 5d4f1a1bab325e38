"""Tensors packed into flat byte buffers of bounded size: few large transfers, and no second full copy of the model."""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

BUCKET_BYTES = 256 * 1024**2
"""Large enough that per-transfer cost vanishes, small beside any accelerator's memory."""


@dataclass(frozen=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightsBucket:
    """Example: WeightsBucket(entries=(TensorEntry("model.norm.weight", (64,), "float32"),), data=<256 bytes>)"""

    entries: tuple[TensorEntry, ...]
    data: np.ndarray


@dataclass(frozen=True)
class DeviceBucket:
    """The same in the memory of a GPU, for a process that sees that GPU: what it says of itself is a handle."""

    entries: tuple[TensorEntry, ...]
    handle: bytes
    num_bytes: int


Bucket = WeightsBucket | DeviceBucket


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightsBucket]:
    """Buckets in order; a tensor larger than a bucket gets one of its own."""
    for together in _batches(tensors, bucket_bytes):
        entries = tuple(_entry(name, tensor.shape, tensor.dtype) for name, tensor in together)
        yield WeightsBucket(entries, np.concatenate([_bytes_of(tensor) for _, tensor in together]))


def unpack(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `pack`, in order. Those of a device bucket are views: they last as long as its memory does."""
    for bucket in buckets:
        match bucket:
            case WeightsBucket():
                yield from cut(torch.from_numpy(bucket.data.copy()), bucket.entries)
            case DeviceBucket():
                yield from cut(open_handle(bucket.handle), bucket.entries)


def cut(flat: Tensor, entries: Iterable[TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie one after another in flat bytes: views, unless numbers of several kinds leave one askew."""
    start = 0
    for entry in entries:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        size = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
        part = flat[start : start + size]
        yield entry.name, (part.clone() if start % dtype.itemsize else part).view(dtype).reshape(entry.shape)
        start += size


def pack_on_device(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[DeviceBucket]:
    """Tensors as numbers of this kind, bucket by bucket in the same memory: a bucket is over when the next is asked for."""
    buffer: Tensor | None = None
    for together in _batches(tensors, bucket_bytes):
        entries = tuple(_entry(name, tensor.shape, dtype) for name, tensor in together)
        size = sum(tensor.numel() for _, tensor in together) * dtype.itemsize
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(max(size, bucket_bytes), dtype=torch.uint8, device=together[0][1].device)
        for (_, tensor), (_, place) in zip(together, cut(buffer, entries), strict=True):
            place.copy_(tensor.detach())
        torch.cuda.synchronize(buffer.device)
        yield DeviceBucket(entries, pickle.dumps(reduce_tensor(buffer)), size)


def open_handle(handle: bytes) -> Tensor:
    """The memory that another process shares."""
    rebuild, arguments = pickle.loads(handle)
    return rebuild(*arguments)


def _batches(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """As many in a row as a bucket takes; at least one."""
    together: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if together and size + tensor.nbytes > bucket_bytes:
            yield together
            together, size = [], 0
        together.append((name, tensor))
        size += tensor.nbytes
    if together:
        yield together


def _entry(name: str, shape: Iterable[int], dtype: torch.dtype) -> TensorEntry:
    return TensorEntry(name, tuple(shape), str(dtype).removeprefix("torch."))


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
