"""Ways for weights to reach an engine, as the transports of a run have them, and what can go wrong on each.

A route is given what travels and, apart from it, what the trainer says it is. It carries one version after another.
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
Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Parcel:
    """A version on its way."""

    version: int
    sent: Named
    promised: Named
    """What the check that travels beside it was taken from."""
    lost: str = ""
    """A tensor whose bucket does not arrive."""

    @property
    def check(self) -> WeightsCheck:
        recorder = CheckRecorder(self.version)
        list(recorder.observe(self.promised))
        return recorder.check

    def is_lost(self, entries: tuple[TensorEntry, ...]) -> bool:
        return self.lost in [entry.name for entry in entries]


class Route(Protocol):
    async def deliver(self, served: InferenceEngine, parcel: Parcel) -> None: ...


class MemoryRoute:
    """What ray does once the buckets are where the engine is."""

    async def deliver(self, served: InferenceEngine, parcel: Parcel) -> None:
        await served.begin_update(InFlightPolicy.FINISH)
        for bucket in pack(parcel.sent, BUCKET_BYTES):
            if not parcel.is_lost(bucket.entries):
                await served.load(bucket)
        await served.finish_update(parcel.version, parcel.check)


class StoreRoute:
    def __init__(self, folder: Path, full_every: int):
        self._store = ObjectStore(f"file://{folder}/store")
        self._writer = WeightsWriter(self._store, "run", full_every, torch.float32, BUCKET_BYTES)
        self._reader = WeightsReader(self._store)

    async def deliver(self, served: InferenceEngine, parcel: Parcel) -> None:
        said = WeightsWriter(self._store, "said", 1, torch.float32).write(parcel.version, parcel.promised)
        written = self._writer.write(parcel.version, parcel.sent)
        lost = [number for number, bucket in enumerate(pack(parcel.sent, BUCKET_BYTES)) if parcel.is_lost(bucket.entries)]
        buckets = tuple(bucket for bucket in written.buckets if bucket.number not in lost)
        weights = written.model_copy(update={"buckets": buckets, "check": said.check})
        self._reader.fetch(weights)
        await served.begin_update(InFlightPolicy.FINISH)
        for bucket in self._reader.buckets(weights):
            await served.load(bucket)
        await served.finish_update(parcel.version, self._reader.check(weights))


class BroadcastRoute:
    def __init__(self, num_workers: int = 1):
        members = ("trainer rank 0", *["engine"] * num_workers)
        self._sender = BroadcastSender("127.0.0.1", members, 30.0, torch.device("cpu"))
        self._have_met = False

    async def deliver(self, served: InferenceEngine, parcel: Parcel) -> None:
        if not self._have_met:
            await asyncio.gather(asyncio.to_thread(self._sender.wait_for_members), served.join(self._sender.rendezvous, 1))
            self._have_met = True
        await served.begin_update(InFlightPolicy.FINISH)
        for entries, flat in pack_reusing_buffer(parcel.sent, torch.float32, BUCKET_BYTES):
            if not parcel.is_lost(entries):
                sending = asyncio.to_thread(self._sender.send, flat)
                await asyncio.gather(sending, served.load(BroadcastBucket(entries, len(flat))))
        await served.finish_update(parcel.version, parcel.check)


ROUTES: dict[str, Callable[[Path, int], Route]] = {
    "memory": lambda _folder, _workers: MemoryRoute(),
    "store, whole": lambda folder, _workers: StoreRoute(folder, full_every=1),
    "store, differences": lambda folder, _workers: StoreRoute(folder, full_every=9),
    "broadcast": lambda _folder, workers: BroadcastRoute(workers),
}
