"""An inference engine as a Ray actor. Requests and completions travel in lists, since a call costs more than a token."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import ray

from roll_core.config.inference import RehearsalInference, TorchInference
from roll_core.config.placement import DeviceKind
from roll_core.config.run import RunConfig
from roll_core.config.training import Precision
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.streaming import as_they_finish
from roll_core.roles.process import settle

if TYPE_CHECKING:
    from roll_core.inference.base import InferenceEngine


class EngineRole:
    def __init__(self, config: RunConfig):
        self._config = config

    async def start(self) -> None:
        self._engine = _build_engine(self._config)
        settle()

    async def answer(self) -> None:
        """Show that somebody is there."""

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        async for completions in as_they_finish(self._engine.generate(request) for request in requests):
            yield completions

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.sleep(0)  # what came before this is with the engine then
        await self._engine.abort(*request_ids)

    async def adopt(self, version: int, buckets: list[ray.ObjectRef]) -> int:
        """Take over weights from the object store; answers their size in bytes."""
        from roll_core.inference.base import WeightsUpdate
        from roll_core.weights.buckets import unpack

        fetched = [await bucket for bucket in buckets]
        await self._engine.adopt(WeightsUpdate(version, unpack(fetched)), self._config.rollout.in_flight)
        return sum(bucket.data.nbytes for bucket in fetched)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()


def _build_engine(config: RunConfig) -> "InferenceEngine":
    num_slots = config.rollout.slots_per_engine
    match config.inference:
        case TorchInference():
            return _build_torch_engine(config, num_slots)
        case RehearsalInference() as latency:
            from roll_core.inference.rehearsal_engine import RehearsalEngine

            return RehearsalEngine(latency, num_slots=num_slots)


def _build_torch_engine(config: RunConfig, num_slots: int) -> "InferenceEngine":
    import torch

    from roll_core.inference.torch_engine import TorchEngine

    torch.set_num_threads(config.cluster.threads_per_device)
    bfloat16 = config.training.precision is Precision.BFLOAT16 and config.cluster.device is DeviceKind.CUDA
    return TorchEngine(
        config.model,
        seed=config.seed,
        num_slots=num_slots,
        device=torch.device(config.cluster.device.value),
        dtype=torch.bfloat16 if bfloat16 else torch.float32,
    )
