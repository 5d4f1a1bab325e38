"""An inference engine as a Ray actor. Requests and completions travel in lists, since a call costs more than a token."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from roll_core.config.inference import RehearsalInference, TorchInference, VllmInference
from roll_core.config.run import RunConfig
from roll_core.errors import EngineDied
from roll_core.inference.completions import as_they_finish
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.roles.process import settle
from roll_core.roles.ray_weights import RayWeights
from roll_core.store.object_store import ObjectStore
from roll_core.types.refs import WeightsRef

if TYPE_CHECKING:
    from roll_core.inference.base import InferenceEngine
    from roll_core.weights.broadcast import Rendezvous
    from roll_core.weights.buckets import BroadcastBucket, DeviceBucket, WeightsBucket
    from roll_core.weights.checks import WeightsCheck
    from roll_core.weights.stored import WeightsReader


log = logging.getLogger(__name__)


class EngineRole:
    def __init__(self, config: RunConfig, store_uri: str):
        self._config = config
        self._store = ObjectStore(store_uri, config.store.retry_seconds)

    async def start(self) -> None:
        self._engine = _build_engine(self._config)
        settle()

    @cached_property
    def _reader(self) -> "WeightsReader":
        from roll_core.weights.stored import WeightsReader

        return WeightsReader(self._store)

    async def answer(self) -> None:
        """Show that the engine is there, not only this process."""
        with _one_life():
            await self._engine.answer()

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        with _one_life():
            async for completions in as_they_finish(self._engine.generate(request) for request in requests):
                yield completions

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.sleep(0)  # what came before this is with the engine then
        with _one_life():
            await self._engine.abort(*request_ids)

    async def adopt(self, weights: RayWeights | WeightsRef) -> int:
        """Take over weights that wait in memory or in the store; answers their size in bytes. They are fetched before
        anything has to wait for them."""
        buckets: Iterable[WeightsBucket]
        if isinstance(weights, RayWeights):
            buckets, check = [await bucket for bucket in weights.buckets], await weights.check
        else:
            await asyncio.to_thread(self._reader.fetch, weights)
            buckets, check = self._reader.buckets(weights), self._reader.check(weights)
        await self.begin_update()
        num_bytes = 0
        with _one_life():
            for bucket in buckets:
                await self._engine.load(bucket)
                num_bytes += bucket.data.nbytes
        await self.finish_update(weights.version, check)
        return num_bytes

    async def begin_update(self) -> None:
        with _one_life():
            await self._engine.begin_update(self._config.rollout.in_flight)

    async def join(self, meeting: "Rendezvous", rank: int) -> None:
        with _one_life():
            await self._engine.join(meeting, rank)

    async def load(self, bucket: "DeviceBucket | BroadcastBucket") -> int:
        """Take over a bucket that a rank on this engine's GPU shares, or that is broadcast; answers its size in bytes."""
        with _one_life():
            await self._engine.load(bucket)
        return bucket.num_bytes

    async def finish_update(self, version: int, check: "WeightsCheck") -> None:
        with _one_life():
            await self._engine.finish_update(version, check)

    async def load_only(self, bucket: "DeviceBucket", version: int, check: "WeightsCheck") -> int:
        """Take over a bucket that has all weights, and serve by them."""
        num_bytes = await self.load(bucket)
        await self.finish_update(version, check)
        return num_bytes

    async def sleep(self) -> None:
        with _one_life():
            await self._engine.sleep()

    async def wake(self) -> None:
        with _one_life():
            await self._engine.wake()


@contextmanager
def _one_life() -> Iterator[None]:
    """A role whose engine died ends with it: who is gone is replaced, wherever that is noticed."""
    try:
        yield
    except EngineDied:
        log.exception("this engine is of no use any more")
        os._exit(1)


def _build_engine(config: RunConfig) -> "InferenceEngine":
    num_slots = config.rollout.slots_per_engine
    match config.inference:
        case RehearsalInference() as latency:
            from roll_core.inference.rehearsal_engine import RehearsalEngine

            return RehearsalEngine(latency, num_slots=num_slots)
        case TorchInference() | VllmInference() as inference:
            return _build_engine_with_model(config, inference, num_slots)


def _build_engine_with_model(
    config: RunConfig, inference: TorchInference | VllmInference, num_slots: int
) -> "InferenceEngine":
    import torch

    from roll_core.models.lean_import import import_models

    device = torch.device(config.cluster.device.value)
    dtype = torch.bfloat16 if config.engines_in_bfloat16 else torch.float32
    num_threads = config.cluster.threads_per_device
    torch.set_num_threads(num_threads)
    match inference:
        case TorchInference():
            import_models()
            from roll_core.inference.torch_engine import TorchEngine

            engine = TorchEngine(config.model, seed=config.seed, num_slots=num_slots, device=device, dtype=dtype)
            if config.training.routing.replay:
                engine.record_experts()
            return engine
        case VllmInference():
            from roll_core.inference.vllm.engine import VllmEngine

            return VllmEngine(
                config.model, inference, num_slots=num_slots, device=device, dtype=dtype, num_threads=num_threads
            )
