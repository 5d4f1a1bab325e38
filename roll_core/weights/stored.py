"""Transport of weights through the store: full versions, and lossless deltas to the version before.

A delta is the XOR of old and new bytes, transposed into byte planes (all first bytes, then all second bytes, ...) and
compressed with zstd. An update changes mostly the low bits of an element, so the planes of high bytes become runs of zeros.
At the learning rates of reinforcement learning most bfloat16 elements do not change at all.

Writer and reader each keep the bytes of the last version on local disk, so that neither holds a policy in memory. An engine
fetches from the store while it still generates.
"""

import json
import tempfile
import threading
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load, save
from torch import Tensor

from roll_core.errors import ArtifactDamaged
from roll_core.store.media.medium import map_in_order
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.weights import read_base, record_weights, weights_record_name
from roll_core.types.refs import ArtifactKind, StoredBucket, WeightsRef, digest_of
from roll_core.weights.buckets import BUCKET_BYTES, TensorEntry, WeightsBucket, pack
from roll_core.weights.checks import CheckRecorder, WeightsCheck, WeightsSample
from roll_core.weights.digests import WeightsDigest

BUCKETS_IN_FLIGHT = 2
"""Buckets being encoded, uploaded or fetched at a time. With the one being packed or written to disk, they bound the
memory."""
_ZSTD_LEVEL = 1
"""zstd compression level; higher levels measured twice as slow and no smaller on deltas."""
_METADATA = "about"
"""Name of the entry with names and columns in a stored WeightsCheck."""

Layout = tuple[tuple[TensorEntry, ...], ...]
"""Tensor entries of each bucket, indexed by bucket number."""


class WeightsWriter:
    """Writer of weights versions to the store, on trainer rank 0.

    Every `full_every`-th version is full; the others are deltas to the version before.
    """

    def __init__(
        self, store: ObjectStore, run_id: str, full_every: int, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
    ):
        self._store = store
        self._run_id = run_id
        self._full_every = full_every
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._local = _LocalCopy()
        self._last: WeightsRef | None = None
        self._versions_since_full = 0

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightsRef:
        """Store a weights version, bucket by bucket, and record it."""
        last, self._last = self._last, None  # during the write the local copy is a mix of two versions
        base = last if last is not None and self._versions_since_full + 1 < self._full_every else None
        digest, recorder = WeightsDigest(), CheckRecorder(version)
        layout: list[tuple[TensorEntry, ...]] = []

        def numbered() -> Iterator[tuple[int, np.ndarray]]:
            for bucket in pack(recorder.observe(digest.observe(tensors)), self._bucket_bytes, self._dtype):
                layout.append(bucket.entries)
                yield len(layout) - 1, bucket.data

        buckets = tuple(map_in_order(partial(self._store_bucket, base), numbered(), BUCKETS_IN_FLIGHT))
        weights = WeightsRef(
            run_id=self._run_id,
            version=version,
            weights_digest=digest.hexdigest(),
            base=weights_record_name(base) if base else None,
            layout=self._store.put(_encode_layout(layout), ArtifactKind.WEIGHTS),
            buckets=buckets,
            check=self._store.put(_encode_check(recorder.check), ArtifactKind.WEIGHTS),
        )
        record_weights(self._store, weights)
        self._last, self._versions_since_full = weights, self._versions_since_full + 1 if base else 0
        return weights

    def _store_bucket(self, base: WeightsRef | None, numbered: tuple[int, np.ndarray]) -> StoredBucket:
        """Store one numbered bucket, full or as a delta to `base`, and keep its bytes on local disk for the next delta."""
        number, data = numbered
        if base is None:
            artifact = self._store.put(data.tobytes(), ArtifactKind.WEIGHTS)
            digest = artifact.digest
        else:
            delta = encode_delta(self._local.read(number), data, self._dtype.itemsize)
            artifact = self._store.put(delta, ArtifactKind.WEIGHTS)
            digest = digest_of(data.data)
        if self._full_every > 1:
            self._local.write(number, data)
        return StoredBucket(number=number, size=data.nbytes, digest=digest, artifact=artifact)


class WeightsReader:
    """Reader of weights versions from the store to local disk, in an engine's process."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._local = _LocalCopy()
        self._fetched: str | None = None
        """Record name of the version on local disk; None if there is none or a fetch was interrupted."""

    def fetch(self, weights: WeightsRef) -> None:
        """Fetch a version to local disk. Deltas are applied to the version on disk if the stored chain reaches it, else
        to the last full version."""
        wanted = weights_record_name(weights)
        if wanted == self._fetched:
            return
        chain = self._delta_chain(weights)
        self._fetched = None
        fetched = map_in_order(partial(self._reconstruct, chain), weights.buckets, BUCKETS_IN_FLIGHT)
        for bucket, data in zip(weights.buckets, fetched, strict=True):
            self._local.write(bucket.number, data)
        self._fetched = wanted

    def buckets(self, weights: WeightsRef) -> Iterator[WeightsBucket]:
        """Yield the buckets of the version fetched last."""
        assert self._fetched == weights_record_name(weights), "fetch it first"
        layout = _decode_layout(self._store.get(weights.layout))
        for bucket in weights.buckets:
            yield WeightsBucket(layout[bucket.number], self._local.read(bucket.number))

    def check(self, weights: WeightsRef) -> WeightsCheck:
        """Read the check stored with a version."""
        return _decode_check(self._store.get(weights.check))

    def _delta_chain(self, weights: WeightsRef) -> list[WeightsRef]:
        """Versions to apply in order: from the last full one, or the one after the version on disk, to `weights`."""
        chain = [weights]
        while chain[0].base not in (None, self._fetched):
            chain.insert(0, read_base(self._store, chain[0]))
        return chain

    def _reconstruct(self, chain: list[WeightsRef], wanted: StoredBucket) -> np.ndarray:
        """Rebuild one bucket of the last version of the chain; raise ArtifactDamaged if its digest is wrong."""
        data = np.empty(0, np.uint8) if chain[0].base is None else self._local.read(wanted.number)
        for link in chain:
            (artifact,) = (bucket.artifact for bucket in link.buckets if bucket.number == wanted.number)
            stored = self._store.get(artifact)
            data = np.frombuffer(stored, np.uint8) if link.base is None else apply_delta(data, stored)
        if chain[-1].base is not None and digest_of(data.data) != wanted.digest:
            raise ArtifactDamaged(
                f"store: bucket {wanted.number} of weights version {chain[-1].version} of {chain[-1].run_id} is not what "
                "was stored, once the differences since the last whole version are applied"
            )
        return data


class _LocalCopy:
    """Bytes of one version on local disk, bucket after bucket, in an unnamed temporary file that vanishes with the
    process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="roll-weights-")  # noqa: SIM115 (stays open as long as this object)
        self._extents: dict[int, tuple[int, int]] = {}
        """Offset and size in bytes of each bucket, by number."""
        self._end = 0
        self._grow_lock = threading.Lock()

    def write(self, number: int, data: np.ndarray) -> None:
        """Write one bucket. Threads may write different buckets concurrently."""
        with self._grow_lock:
            if self._extents.get(number, (0, None))[1] != data.nbytes:
                self._extents[number] = self._end, data.nbytes
                self._end += data.nbytes
                self._file.truncate(self._end)
        self.read(number)[:] = data

    def read(self, number: int) -> np.ndarray:
        """Memory-mapped view of one bucket; it changes when the bucket is written again."""
        start, size = self._extents[number]
        return np.memmap(self._file, np.uint8, "r+", start, (size,))


def encode_delta(old: np.ndarray, new: np.ndarray, width: int) -> bytes:
    """Encode the delta that turns `old` into `new`, whose elements are `width` bytes wide."""
    planes = np.ascontiguousarray((old ^ new).reshape(-1, width).T)
    return bytes([width]) + pa.Codec("zstd", _ZSTD_LEVEL).compress(planes.data, asbytes=True)


def apply_delta(old: np.ndarray, delta: bytes) -> np.ndarray:
    """Apply a delta from `encode_delta` to `old` and return the new bytes."""
    width = delta[0]
    planes = pa.Codec("zstd").decompress(memoryview(delta)[1:], decompressed_size=old.nbytes, asbytes=True)
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(width, -1).T).reshape(-1) ^ old


def _encode_layout(layout: Iterable[Iterable[TensorEntry]]) -> bytes:
    return json.dumps([[(entry.name, entry.dtype, entry.shape) for entry in bucket] for bucket in layout]).encode()


def _decode_layout(data: bytes) -> Layout:
    return tuple(tuple(TensorEntry(n, tuple(shape), dtype) for n, dtype, shape in bucket) for bucket in json.loads(data))


def _encode_check(check: WeightsCheck) -> bytes:
    metadata = {"names": check.names, "columns": {sample.name: sample.columns for sample in check.samples}}
    encoded_metadata = torch.frombuffer(bytearray(json.dumps(metadata).encode()), dtype=torch.uint8)
    return save({_METADATA: encoded_metadata} | {sample.name: sample.values.contiguous() for sample in check.samples})


def _decode_check(data: bytes) -> WeightsCheck:
    tensors = load(data)
    metadata = json.loads(tensors.pop(_METADATA).numpy().tobytes())
    samples = (WeightsSample(name, tuple(columns), tensors[name]) for name, columns in metadata["columns"].items())
    return WeightsCheck(tuple(metadata["names"]), tuple(samples))
