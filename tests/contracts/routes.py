"""Routes of weights into an engine, one per transport of a run, with faults to inject: for `test_inference_engine.py`.

A route delivers one weights version after another. Sent tensors and the tensors of the check are given apart, so that they
can differ.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from roll_core.config.rollout import InFlightPolicy
from roll_core.inference.base import InferenceEngine
from roll_core.store.object_store import ObjectStore
from roll_core.weights.broadcast import BroadcastSender
from roll_core.weights.buckets import BroadcastBucket, TensorEntry, pack, pack_reusing_buffer
from roll_core.weights.checks import CheckRecorder, WeightsCheck
from roll_core.weights.stored import WeightsReader, WeightsWriter

BUCKET_BYTES = 10_000
NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Delivery:
    """Weights version to deliver, intact or damaged."""

    version: int
    sent: NamedTensors
    checked: NamedTensors
    """Tensors from which the trainer took the check; they differ from `sent` if the delivery is damaged."""
    lost: str = ""
    """Name of a tensor whose bucket does not arrive."""

    @property
    def check(self) -> WeightsCheck:
        """Check that the engine must pass."""
        recorder = CheckRecorder(self.version)
        list(recorder.observe(self.checked))
        return recorder.check

    def is_lost(self, entries: tuple[TensorEntry, ...]) -> bool:
        """True if the bucket with these entries does not arrive."""
        return self.lost in [entry.name for entry in entries]


class Route(Protocol):
    """Transport of weights into one engine."""

    async def deliver(self, engine: InferenceEngine, delivery: Delivery) -> None:
        """Send a weights version; raise `WrongWeights` if the engine refuses it."""


class MemoryRoute:
    """Buckets in host memory, as after a transfer through Ray's object store."""

    async def deliver(self, engine: InferenceEngine, delivery: Delivery) -> None:
        await engine.begin_update(InFlightPolicy.FINISH)
        for bucket in pack(delivery.sent, BUCKET_BYTES):
            if not delivery.is_lost(bucket.entries):
                await engine.load(bucket)
        await engine.finish_update(delivery.version, delivery.check)


class StoreRoute:
    """Weights versions in a store: whole every `full_every` versions, else as deltas."""

    def __init__(self, folder: Path, full_every: int):
        self._store = ObjectStore(f"file://{folder}/store")
        self._writer = WeightsWriter(self._store, "run", full_every, torch.float32, BUCKET_BYTES)
        self._reader = WeightsReader(self._store)

    async def deliver(self, engine: InferenceEngine, delivery: Delivery) -> None:
        checked = WeightsWriter(self._store, "checked", 1, torch.float32).write(delivery.version, delivery.checked)
        written = self._writer.write(delivery.version, delivery.sent)
        packed = enumerate(pack(delivery.sent, BUCKET_BYTES))
        lost = [number for number, bucket in packed if delivery.is_lost(bucket.entries)]
        buckets = tuple(bucket for bucket in written.buckets if bucket.number not in lost)
        weights = written.model_copy(update={"buckets": buckets, "check": checked.check})
        self._reader.fetch(weights)
        await engine.begin_update(InFlightPolicy.FINISH)
        for bucket in self._reader.buckets(weights):
            await engine.load(bucket)
        await engine.finish_update(delivery.version, self._reader.check(weights))


class BroadcastRoute:
    """Broadcast between trainer rank 0 and the workers of the engine."""

    def __init__(self, num_workers: int = 1):
        members = ("trainer rank 0", *["engine"] * num_workers)
        self._sender = BroadcastSender("127.0.0.1", members, 30.0, torch.device("cpu"))
        self._has_joined = False

    async def deliver(self, engine: InferenceEngine, delivery: Delivery) -> None:
        if not self._has_joined:
            await asyncio.gather(asyncio.to_thread(self._sender.wait_for_members), engine.join(self._sender.rendezvous, 1))
            self._has_joined = True
        await engine.begin_update(InFlightPolicy.FINISH)
        for entries, flat in pack_reusing_buffer(delivery.sent, torch.float32, BUCKET_BYTES):
            if not delivery.is_lost(entries):
                sending = asyncio.to_thread(self._sender.send, flat)
                await asyncio.gather(sending, engine.load(BroadcastBucket(entries, len(flat))))
        await engine.finish_update(delivery.version, delivery.check)


ROUTES: dict[str, Callable[[Path, int], Route]] = {
    "memory": lambda _folder, _workers: MemoryRoute(),
    "store, whole": lambda folder, _workers: StoreRoute(folder, full_every=1),
    "store, deltas": lambda folder, _workers: StoreRoute(folder, full_every=9),
    "broadcast": lambda _folder, workers: BroadcastRoute(workers),
}
"""Constructors of routes, from a folder and the number of the engine's workers."""
