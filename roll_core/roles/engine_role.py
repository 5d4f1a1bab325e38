"""Inference engine as a Ray actor. Requests and completions travel in lists, since a call costs more than a token."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from roll_core.concurrency import as_they_finish
from roll_core.config.inference import RehearsalInference, TorchInference, VllmInference
from roll_core.config.run import RunConfig
from roll_core.errors import EngineDied
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.roles.process import freeze_garbage_collector, naming_device
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
    """Ray actor that holds one inference engine.

    Methods that have the name of a method of `InferenceEngine` forward to it. If the engine dies, the actor ends with it.
    """

    def __init__(self, config: RunConfig, store_uri: str):
        self._config = config
        self._store = ObjectStore(store_uri, config.store.retry_seconds)

    async def start(self) -> None:
        """Build the engine and load its model."""
        with naming_device():
            self._engine = _build_engine(self._config)
        freeze_garbage_collector()

    @cached_property
    def _reader(self) -> "WeightsReader":
        """Reader of weights in the store; built on first use, since it imports torch."""
        from roll_core.weights.stored import WeightsReader

        return WeightsReader(self._store)

    async def ping(self) -> None:
        """Return once the engine responds, not only this process."""
        with _ending_with_engine():
            await self._engine.ping()

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        """Generate completions of all requests; yield them in the order they finish, several at a time."""
        with _ending_with_engine():
            async for completions in as_they_finish(self._engine.generate(request) for request in requests):
                yield completions

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests now; their completions have the tokens generated so far."""
        await asyncio.sleep(0)  # requests sent before this call reach the engine first
        with _ending_with_engine():
            await self._engine.abort(*request_ids)

    async def adopt(self, weights: RayWeights | WeightsRef) -> int:
        """Load weights from Ray's object store or from the store; return their size in bytes. They are fetched before the
        engine stops for them."""
        buckets: Iterable[WeightsBucket]
        if isinstance(weights, RayWeights):
            buckets, check = [await bucket for bucket in weights.buckets], await weights.check
        else:
            await asyncio.to_thread(self._reader.fetch, weights)
            buckets, check = self._reader.buckets(weights), self._reader.check(weights)
        await self.begin_update()
        num_bytes = 0
        with _ending_with_engine():
            for bucket in buckets:
                await self._engine.load(bucket)
                num_bytes += bucket.data.nbytes
        await self.finish_update(weights.version, check)
        return num_bytes

    async def begin_update(self) -> None:
        """Stop generating for an update; `rollout.in_flight` decides what becomes of running requests."""
        with _ending_with_engine():
            await self._engine.begin_update(self._config.rollout.in_flight)

    async def join(self, rendezvous: "Rendezvous", rank: int) -> None:
        """Join a broadcast group as this rank, and as the next ranks if the engine has several workers."""
        with _ending_with_engine():
            await self._engine.join(rendezvous, rank)

    async def load(self, bucket: "DeviceBucket | BroadcastBucket") -> int:
        """Load a bucket that a trainer rank shares on this GPU, or broadcasts; return its size in bytes."""
        with _ending_with_engine():
            await self._engine.load(bucket)
        return bucket.num_bytes

    async def finish_update(self, version: int, check: "WeightsCheck") -> None:
        """Check the loaded weights and serve with them under this version number."""
        with _ending_with_engine():
            await self._engine.finish_update(version, check)

    async def load_all(self, bucket: "DeviceBucket", version: int, check: "WeightsCheck") -> int:
        """Load a bucket that holds all weights and finish the update; return the size in bytes."""
        num_bytes = await self.load(bucket)
        await self.finish_update(version, check)
        return num_bytes

    async def sleep(self) -> None:
        """Release the device memory while a colocated trainer works."""
        with _ending_with_engine():
            await self._engine.sleep()

    async def wake(self) -> None:
        """Allocate the device memory again, after an update has loaded weights."""
        with _ending_with_engine():
            await self._engine.wake()


@contextmanager
def _ending_with_engine() -> Iterator[None]:
    """End this process if the engine dies: callers notice a dead role, and the fleet replaces it. A broken GPU is named
    instead, since a successor would get the same one."""
    try:
        with naming_device():
            yield
    except EngineDied:
        log.exception("this engine is of no use any more")
        os._exit(1)


def _build_engine(config: RunConfig) -> "InferenceEngine":
    """Build the engine that `inference.kind` names."""
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
    """Build an engine that runs a model; imports torch."""
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
            from roll_core.models.determinism import make_deterministic_where_possible

            if config.training.deterministic:
                make_deterministic_where_possible()
            engine = TorchEngine(config.model, seed=config.seed, num_slots=num_slots, device=device, dtype=dtype)
            if config.training.routing.replay:
                engine.record_experts()
            return engine
        case VllmInference():
            from roll_core.inference.vllm.engine import VllmEngine

            return VllmEngine(
                config.model, inference, num_slots=num_slots, device=device, dtype=dtype, num_threads=num_threads
            )
