"""Packing of tensors into buckets: flat byte buffers of bounded size.

Buckets make few large transfers out of many tensors, without a second full copy of the model. Trainer ranks pack, engines
unpack.
"""

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
"""Default bucket size in bytes: large enough to amortize the cost of a transfer, small beside any accelerator's memory."""


@dataclass(frozen=True)
class TensorEntry:
    """Name, shape and dtype of one tensor in a bucket.

    Example: TensorEntry("model.norm.weight", (64,), "float32")
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Layout of tensors in flat bytes. Layouts compare by identity, since comparing hundreds of entries takes longer than
    copying the tensors."""

    entries: tuple[TensorEntry, ...]
    starts: tuple[int, ...]
    """Byte offset of each tensor."""


@dataclass(frozen=True)
class WeightsBucket:
    """Bucket whose bytes are in host memory.

    Example: WeightsBucket(entries=(TensorEntry("model.norm.weight", (64,), "float32"),), data=<256 bytes>)
    """

    entries: tuple[TensorEntry, ...]
    data: np.ndarray


@dataclass(frozen=True)
class DeviceBucket:
    """Bucket in GPU memory, for another process that sees the same GPU. It carries a CUDA IPC handle, not the bytes."""

    entries: tuple[TensorEntry, ...]
    starts: tuple[int, ...]
    """Byte offset of each tensor in the shared memory."""
    handle: bytes
    """Pickled handle that `open_handle` turns back into a tensor."""
    num_bytes: int
    """Total size of the tensors in bytes."""


@dataclass(frozen=True)
class BroadcastBucket:
    """Bucket whose bytes arrive through the broadcast group that the engine has joined."""

    entries: tuple[TensorEntry, ...]
    num_bytes: int


Bucket = WeightsBucket | DeviceBucket | BroadcastBucket


def pack(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
) -> Iterator[WeightsBucket]:
    """Pack tensors into host buckets, in order, converted to `dtype` if one is given. A tensor larger than `bucket_bytes`
    gets a bucket of its own."""
    for batch in _tensor_batches(((name, tensor.to(dtype or tensor.dtype)) for name, tensor in tensors), bucket_bytes):
        entries = tuple(_entry(name, tensor.shape, tensor.dtype) for name, tensor in batch)
        yield WeightsBucket(entries, np.concatenate([_bytes_of(tensor) for _, tensor in batch]))


def unpack(buckets: Iterable[WeightsBucket | DeviceBucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of buckets, in order. Tensors of a device bucket are views, valid as long as the shared
    memory is."""
    for bucket in buckets:
        match bucket:
            case WeightsBucket():
                yield from split_flat(torch.from_numpy(bucket.data.copy()), bucket.entries)
            case DeviceBucket():
                yield from split_flat(open_handle(bucket.handle), bucket.entries, bucket.starts)


def split_flat(
    flat: Tensor, entries: Sequence[TensorEntry], starts: Sequence[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors stored in flat bytes; `starts` defaults to one tensor directly after another.

    Tensors are views of `flat`. Only a tensor that mixed dtypes leave misaligned is copied.
    """
    for entry, start in zip(entries, starts or starts_of(entries), strict=True):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        part = flat[start : start + _num_bytes(entry)]
        yield entry.name, (part.clone() if start % dtype.itemsize else part).view(dtype).reshape(entry.shape)


def starts_of(entries: Sequence[TensorEntry]) -> tuple[int, ...]:
    """Byte offsets of tensors stored directly one after another."""
    return tuple(accumulate(map(_num_bytes, entries[:-1]), initial=0))


def share_in_place(tensors: Sequence[tuple[str, Tensor]]) -> DeviceBucket:
    """Share tensors of one GPU allocation without a copy. They must stay unchanged until the receiving process has read
    them."""
    flat = _whole_storage(tensors[0][1])
    assert all(tensor.untyped_storage().data_ptr() == flat.data_ptr() for _, tensor in tensors), "several allocations"
    starts = tuple(int(tensor.storage_offset()) * tensor.itemsize for _, tensor in tensors)
    entries = tuple(_entry(name, tensor.shape, tensor.dtype) for name, tensor in tensors)
    torch.cuda.synchronize(flat.device)
    return DeviceBucket(entries, starts, pickle.dumps(reduce_tensor(flat)), sum(map(_num_bytes, entries)))


def pack_on_device(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[DeviceBucket]:
    """Pack tensors into buckets on their GPU, converted to `dtype`, for other processes that see that GPU. All buckets
    reuse one buffer, so the next bucket overwrites the last."""
    for entries, flat in pack_reusing_buffer(tensors, dtype, bucket_bytes):
        torch.cuda.synchronize(flat.device)
        yield DeviceBucket(entries, starts_of(entries), pickle.dumps(reduce_tensor(_whole_storage(flat))), len(flat))


def pack_reusing_buffer(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[tuple[TensorEntry, ...], Tensor]]:
    """Pack tensors, converted to `dtype`, into one buffer on their device: yields (entries, bytes) bucket by bucket. The
    next bucket overwrites the last."""
    buffer: Tensor | None = None
    for batch in _tensor_batches(tensors, bucket_bytes):
        entries = tuple(_entry(name, tensor.shape, dtype) for name, tensor in batch)
        size = sum(map(_num_bytes, entries))
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(max(size, bucket_bytes), dtype=torch.uint8, device=batch[0][1].device)
        for (_, tensor), (_, target) in zip(batch, split_flat(buffer, entries), strict=True):
            target.copy_(tensor.detach())
        yield entries, buffer[:size]


def open_handle(handle: bytes) -> Tensor:
    """Open the GPU memory that another process shares, as a flat byte tensor."""
    rebuild, arguments = pickle.loads(handle)
    return rebuild(*arguments)


def in_batches(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Group consecutive items into batches whose sizes sum to at most `limit`. A larger item is a batch of its own."""
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and size + size_of(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


def _tensor_batches(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    return in_batches(tensors, lambda named: named[1].nbytes, bucket_bytes)


def _entry(name: str, shape: Iterable[int], dtype: torch.dtype) -> TensorEntry:
    return TensorEntry(name, tuple(shape), str(dtype).removeprefix("torch."))


def _whole_storage(tensor: Tensor) -> Tensor:
    """All bytes of the allocation that a tensor is part of. Tensors of one allocation thus share one handle."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _num_bytes(entry: TensorEntry) -> int:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
