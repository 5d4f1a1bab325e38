"""Tensors packed into flat byte buffers of bounded size: few large transfers, and no second full copy of the model."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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


class WeightsDigest:
    """SHA-256 of weights by name, shape and bytes, whatever buckets they travel in."""

    def __init__(self) -> None:
        self._entries, self._bytes = hashlib.sha256(), hashlib.sha256()

    def add(self, bucket: WeightsBucket) -> None:
        for entry in bucket.entries:
            self._entries.update(f"{entry.name} {entry.shape} {entry.dtype}\n".encode())
        self._bytes.update(bucket.data.data)

    def hexdigest(self) -> str:
        return hashlib.sha256(self._entries.digest() + self._bytes.digest()).hexdigest()


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightsBucket]:
    """Buckets in order; a tensor larger than a bucket gets one of its own."""
    entries: list[TensorEntry] = []
    parts: list[np.ndarray] = []
    size = 0
    for name, tensor in tensors:
        part = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        if parts and size + part.nbytes > bucket_bytes:
            yield WeightsBucket(tuple(entries), np.concatenate(parts))
            entries, parts, size = [], [], 0
        entries.append(TensorEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        parts.append(part)
        size += part.nbytes
    if parts:
        yield WeightsBucket(tuple(entries), np.concatenate(parts))


def unpack(buckets: Iterable[WeightsBucket]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `pack`, in order, each a copy of its own."""
    for bucket in buckets:
        start = 0
        for entry in bucket.entries:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            size = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
            flat = torch.from_numpy(bucket.data[start : start + size].copy()).view(dtype)
            yield entry.name, flat.reshape(entry.shape)
            start += size
