"""Weights on their way through the store: whole, or as what changed since the version before, bit by bit.

A difference is the exclusive or of the bytes, first bytes of all numbers, then all second ones and so on, compressed: an
update changes the low bits of a number, so most of its high bytes become runs of zeros. At the learning rates of
reinforcement learning most bfloat16 numbers do not change at all.

Both sides keep the bytes of the last version on local disk, so that neither holds a policy in memory, and an engine reads
from the store while it still generates.
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
from roll_core.store.media.medium import in_order
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.weights import read_base, record_weights, weights_record_name
from roll_core.types.refs import ArtifactKind, StoredBucket, WeightsRef, digest_of
from roll_core.weights.buckets import BUCKET_BYTES, TensorEntry, WeightsBucket, pack
from roll_core.weights.checks import Watch, WeightsCheck, WeightsSample
from roll_core.weights.digests import WeightsDigest

BUCKETS_IN_FLIGHT = 2
"""Being encoded, sent or fetched at a time: with the one that is being packed or laid down, all that is in memory."""
_LEVEL = 1
"""Of zstd: higher ones were seen to be twice as slow and not smaller on differences."""
_ABOUT = "about"

Layout = tuple[tuple[TensorEntry, ...], ...]


class WeightsWriter:
    """The trainer's side: one version after the other."""

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
        self._since_whole = 0

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightsRef:
        """Store a version, bucket by bucket, and record it."""
        last, self._last = self._last, None  # while this goes on, what is on disk is neither version
        base = last if last is not None and self._since_whole + 1 < self._full_every else None
        digest, watch = WeightsDigest(), Watch(version)
        layout: list[tuple[TensorEntry, ...]] = []

        def numbered() -> Iterator[tuple[int, np.ndarray]]:
            for bucket in pack(watch.over(digest.over(tensors)), self._bucket_bytes, self._dtype):
                layout.append(bucket.entries)
                yield len(layout) - 1, bucket.data

        buckets = tuple(in_order(partial(self._put, base), numbered(), BUCKETS_IN_FLIGHT))
        weights = WeightsRef(
            run_id=self._run_id,
            version=version,
            weights_digest=digest.hexdigest(),
            base=weights_record_name(base) if base else None,
            layout=self._store.put(_encode_layout(layout), ArtifactKind.WEIGHTS),
            buckets=buckets,
            check=self._store.put(_encode_check(watch.check), ArtifactKind.WEIGHTS),
        )
        record_weights(self._store, weights)
        self._last, self._since_whole = weights, self._since_whole + 1 if base else 0
        return weights

    def _put(self, base: WeightsRef | None, numbered: tuple[int, np.ndarray]) -> StoredBucket:
        number, data = numbered
        if base is None:
            artifact = self._store.put(data.tobytes(), ArtifactKind.WEIGHTS)
            digest = artifact.digest
        else:
            difference = encode_difference(self._local.read(number), data, self._dtype.itemsize)
            artifact = self._store.put(difference, ArtifactKind.WEIGHTS)
            digest = digest_of(data.data)
        if self._full_every > 1:
            self._local.write(number, data)
        return StoredBucket(number=number, size=data.nbytes, digest=digest, artifact=artifact)


class WeightsReader:
    """An engine's side: it has a version, and is brought to another."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._local = _LocalCopy()
        self._have: str | None = None
        """The record of what is on disk."""

    def fetch(self, weights: WeightsRef) -> None:
        """Lay a version down on disk: from the one that is there, if the stored differences are to that, else from the last
        whole one."""
        wanted = weights_record_name(weights)
        if wanted == self._have:
            return
        steps = self._steps(weights)
        self._have = None
        fetched = in_order(partial(self._bring, steps), weights.buckets, BUCKETS_IN_FLIGHT)
        for bucket, data in zip(weights.buckets, fetched, strict=True):
            self._local.write(bucket.number, data)
        self._have = wanted

    def buckets(self, weights: WeightsRef) -> Iterator[WeightsBucket]:
        """What was fetched last, bucket by bucket."""
        assert self._have == weights_record_name(weights), "fetch it first"
        layout = _decode_layout(self._store.get(weights.layout))
        for bucket in weights.buckets:
            yield WeightsBucket(layout[bucket.number], self._local.read(bucket.number))

    def check(self, weights: WeightsRef) -> WeightsCheck:
        return _decode_check(self._store.get(weights.check))

    def _steps(self, weights: WeightsRef) -> list[WeightsRef]:
        """Versions to go through."""
        steps = [weights]
        while steps[0].base not in (None, self._have):
            steps.insert(0, read_base(self._store, steps[0]))
        return steps

    def _bring(self, steps: list[WeightsRef], wanted: StoredBucket) -> np.ndarray:
        """A bucket of the last of these versions, by way of the others."""
        data = np.empty(0, np.uint8) if steps[0].base is None else self._local.read(wanted.number)
        for step in steps:
            (artifact,) = (bucket.artifact for bucket in step.buckets if bucket.number == wanted.number)
            stored = self._store.get(artifact)
            data = np.frombuffer(stored, np.uint8) if step.base is None else apply_difference(data, stored)
        if steps[-1].base is not None and digest_of(data.data) != wanted.digest:
            raise ArtifactDamaged(
                f"store: bucket {wanted.number} of weights version {steps[-1].version} of {steps[-1].run_id} is not what "
                "was stored, once the differences since the last whole version are applied"
            )
        return data


class _LocalCopy:
    """The bytes of one version, bucket after bucket, in a file without a name, which is gone when its process is."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="roll-weights-")  # noqa: SIM115 (as long as this lives)
        self._places: dict[int, tuple[int, int]] = {}
        """Where each bucket begins, and its size."""
        self._end = 0
        self._growing = threading.Lock()

    def write(self, number: int, data: np.ndarray) -> None:
        """From several threads, each for other buckets."""
        with self._growing:
            if self._places.get(number, (0, None))[1] != data.nbytes:
                self._places[number] = self._end, data.nbytes
                self._end += data.nbytes
                self._file.truncate(self._end)
        self.read(number)[:] = data

    def read(self, number: int) -> np.ndarray:
        """A view of the file: it changes when the bucket is written again."""
        start, size = self._places[number]
        return np.memmap(self._file, np.uint8, "r+", start, (size,))


def encode_difference(old: np.ndarray, new: np.ndarray, width: int) -> bytes:
    """What turns some bytes into others, which are numbers of `width` bytes."""
    planes = np.ascontiguousarray((old ^ new).reshape(-1, width).T)
    return bytes([width]) + pa.Codec("zstd", _LEVEL).compress(planes.data, asbytes=True)


def apply_difference(old: np.ndarray, difference: bytes) -> np.ndarray:
    """The bytes that `encode_difference` was given."""
    width = difference[0]
    planes = pa.Codec("zstd").decompress(memoryview(difference)[1:], decompressed_size=old.nbytes, asbytes=True)
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(width, -1).T).reshape(-1) ^ old


def _encode_layout(layout: Iterable[Iterable[TensorEntry]]) -> bytes:
    return json.dumps([[(entry.name, entry.dtype, entry.shape) for entry in bucket] for bucket in layout]).encode()


def _decode_layout(data: bytes) -> Layout:
    return tuple(tuple(TensorEntry(n, tuple(shape), dtype) for n, dtype, shape in bucket) for bucket in json.loads(data))


def _encode_check(check: WeightsCheck) -> bytes:
    about = {"names": check.names, "columns": {sample.name: sample.columns for sample in check.samples}}
    described = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    return save({_ABOUT: described} | {sample.name: sample.values.contiguous() for sample in check.samples})


def _decode_check(data: bytes) -> WeightsCheck:
    tensors = load(data)
    about = json.loads(tensors.pop(_ABOUT).numpy().tobytes())
    samples = (WeightsSample(name, tuple(columns), tensors[name]) for name, columns in about["columns"].items())
    return WeightsCheck(tuple(about["names"]), tuple(samples))
