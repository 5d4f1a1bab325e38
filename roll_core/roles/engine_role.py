"""An inference engine as a Ray actor. Requests and completions travel in lists, since a call costs more than a token."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from roll_core.config.inference import RehearsalInference, TorchInference, VllmInference
from roll_core.config.placement import DeviceKind
from roll_core.config.run import RunConfig
from roll_core.config.training import Precision
from roll_core.errors import EngineDied
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.streaming import as_they_finish
from roll_core.roles.bucketed import Bucketed
from roll_core.roles.process import settle

if TYPE_CHECKING:
    from roll_core.inference.base import InferenceEngine
    from roll_core.weights.buckets import DeviceBucket
    from roll_core.weights.checks import WeightsCheck


log = logging.getLogger(__name__)


class EngineRole:
    def __init__(self, config: RunConfig):
        self._config = config

    async def start(self) -> None:
        self._engine = _build_engine(self._config)
        settle()

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

    async def adopt(self, weights: Bucketed) -> int:
        """Take over weights from the object store; answers their size in bytes."""
        buckets = [await bucket for bucket in weights.buckets]  # before anything has to wait for them
        await self.begin_update()
        with _one_life():
            for bucket in buckets:
                await self._engine.load(bucket)
        await self.finish_update(weights.version, await weights.check)
        return sum(bucket.data.nbytes for bucket in buckets)

    async def begin_update(self) -> None:
        with _one_life():
            await self._engine.begin_update(self._config.rollout.in_flight)

    async def load(self, bucket: "DeviceBucket") -> int:
        """Take over a bucket that a rank on this engine's GPU shares; answers its size in bytes."""
        with _one_life():
            await self._engine.load(bucket)
        return bucket.num_bytes

    async def finish_update(self, version: int, check: "WeightsCheck") -> None:
        with _one_life():
            await self._engine.finish_update(version, check)

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

    device = torch.device(config.cluster.device.value)
    bfloat16 = config.training.precision is Precision.BFLOAT16 and config.cluster.device is DeviceKind.CUDA
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    num_threads = config.cluster.threads_per_device
    torch.set_num_threads(num_threads)
    match inference:
        case TorchInference():
            from roll_core.inference.torch_engine import TorchEngine

            return TorchEngine(config.model, seed=config.seed, num_slots=num_slots, device=device, dtype=dtype)
        case VllmInference():
            from roll_core.inference.vllm_engine import VllmEngine

            return VllmEngine(
                config.model, inference, num_slots=num_slots, device=device, dtype=dtype, num_threads=num_threads
            )
