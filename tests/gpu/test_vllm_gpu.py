"""vLLM engine on one GPU beside the trainer: weights through GPU memory, sleep, wake, resumed requests. `make test-gpu`."""

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import replace

import pytest
import torch

from roll_core.batching.packing import PackingLimits
from roll_core.batching.samples import demonstration_sample
from roll_core.config.inference import VllmInference
from roll_core.config.model import ScratchModel
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.rollout import InFlightPolicy
from roll_core.config.training.training import Packing, Precision, TrainingConfig
from roll_core.errors import WrongWeights
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.vllm.engine import VllmEngine
from roll_core.training.base import Policy
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.trajectory import Ending
from roll_core.weights.buckets import pack, pack_on_device, share_in_place
from roll_core.weights.checks import CheckRecorder
from tests.micro_batches import cut

GPU = torch.device("cuda")
MODEL = ScratchModel(max_positions=256, hidden_size=256, intermediate_size=768, num_heads=4, num_kv_heads=2)
NO_STOP: tuple[int, ...] = ()


def new_trainer(precision: Precision, seed: int) -> TorchBackend:
    settings = TorchSettings(TrainingConfig(precision=precision), seed=seed, temperature=1.0, device=GPU)
    backend = TorchBackend(MODEL, settings)
    backend.start_optimizer(OptimizerConfig(), total_steps=1)
    return backend


class Subject:
    """Engine under test with its event loop; all tests of a precision share it."""

    def __init__(self, precision: Precision):
        self.precision = precision
        self.dtype = torch.bfloat16 if precision is Precision.BFLOAT16 else torch.float32
        self.tolerance = 0.1 if precision is Precision.BFLOAT16 else 0.01  # vLLM's attention multiplies in TF32
        self._runner = asyncio.Runner()
        self.run = self._runner.run
        self.engine = self.run(self._start())

    async def _start(self) -> VllmEngine:
        config = VllmInference(memory_share=0.2)
        return VllmEngine(MODEL, config, num_slots=64, device=GPU, dtype=self.dtype, num_threads=4)

    async def adopt_shared(
        self, version: int, backend: TorchBackend, in_flight: InFlightPolicy = InFlightPolicy.FINISH
    ) -> None:
        """Publish weights through GPU memory, as in a run: in place, and every third version through small buckets."""
        recorder = CheckRecorder(version)
        await self.engine.begin_update(in_flight)
        weights = list(recorder.observe(backend.weights()))
        by_buckets = pack_on_device(weights, self.dtype, bucket_bytes=500_000)
        for bucket in by_buckets if version % 3 == 2 else [share_in_place(weights)]:
            await self.engine.load(bucket)
        await self.engine.finish_update(version, recorder.check)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return await asyncio.gather(*(self.engine.generate(request) for request in requests))

    def close(self) -> None:
        self.engine.close()
        del self.engine
        self._runner.close()


@pytest.fixture(scope="module", params=[Precision.FLOAT32, Precision.BFLOAT16])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    one = Subject(request.param)
    yield one
    one.close()


def make_requests(count: int, length: int = 40, stop: tuple[int, ...] = (1,)) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{i}", (5, 6 + i % 9, 7), length, 1.0, stop, seed=i) for i in range(count)]


def largest_mismatch(backend: TorchBackend, requests: list[GenerationRequest], completions: list[Completion]) -> float:
    samples = [demonstration_sample(r.prompt_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)]
    (batch,) = cut(samples, PackingLimits(65536, None, Packing.ROWS))
    sampler_logprobs_N = torch.tensor([logprob for c in completions for logprob in c.sampler_logprobs])
    (trainer_logprobs_N,) = backend.logprobs([batch], Policy.CURRENT)
    return (trainer_logprobs_N - sampler_logprobs_N[batch.token_index_N]).abs().max().item()


def test_sampler_and_trainer_logprobs_match_after_updates_through_shared_memory_and_sleep(subject):
    requests = make_requests(48)

    async def after_updates() -> tuple[list[Completion], list[Completion]]:
        for version in (1, 2, 3):
            await subject.adopt_shared(version, new_trainer(subject.precision, seed=version))
        before = await subject.generate(requests)
        await subject.engine.sleep()
        await subject.adopt_shared(4, new_trainer(subject.precision, seed=3))
        await subject.engine.wake()
        return before, await subject.generate(requests)

    before, after = subject.run(after_updates())
    for completions in (before, after):
        assert largest_mismatch(new_trainer(subject.precision, seed=3), requests, completions) < subject.tolerance


def test_sampler_and_trainer_logprobs_match_after_an_update_through_host_memory(subject):
    requests, backend = make_requests(16), new_trainer(subject.precision, seed=4)

    async def after_update() -> list[Completion]:
        recorder = CheckRecorder(1)
        await subject.engine.begin_update(InFlightPolicy.FINISH)
        for bucket in pack(recorder.observe(backend.weights()), bucket_bytes=500_000):
            await subject.engine.load(bucket)
        await subject.engine.finish_update(1, recorder.check)
        return await subject.generate(requests)

    assert largest_mismatch(backend, requests, subject.run(after_update())) < subject.tolerance


def test_damaged_weights_are_refused_by_name(subject):
    backend = new_trainer(subject.precision, seed=5)

    async def refused() -> None:
        for version in range(1, 4):
            recorder = CheckRecorder(version)
            list(recorder.observe(backend.weights()))
            matrices = [sample.name for sample in recorder.check.samples if sample.values.ndim == 2]
            for name in matrices:
                damaged = ((n, t.roll(1, dims=-1) if n == name else t) for n, t in backend.weights())
                await subject.engine.begin_update(InFlightPolicy.FINISH)
                for bucket in pack_on_device(damaged, subject.dtype):
                    await subject.engine.load(bucket)
                with pytest.raises(WrongWeights, match=f"version {version} differs .*{name}"):
                    await subject.engine.finish_update(version, recorder.check)
        await subject.adopt_shared(9, backend)

    subject.run(refused())


@pytest.mark.parametrize("in_flight", [InFlightPolicy.RESUME, InFlightPolicy.CONTINUE])
def test_requests_interrupted_by_new_weights_continue_with_the_tokens_of_uninterrupted_ones(subject, in_flight):
    """The update brings the same weights under another version number while all requests are in flight.

    Only float32 is compared token by token: in bfloat16, another batch rounds differently, which can change a sampled token.
    """
    backend, requests = new_trainer(subject.precision, seed=6), make_requests(24, length=200, stop=NO_STOP)

    async def across_an_update() -> tuple[list[Completion], list[Completion]]:
        await subject.adopt_shared(1, backend)
        whole = await subject.generate(requests)
        pending = [asyncio.create_task(subject.engine.generate(request)) for request in requests]
        await subject.engine.generate(GenerationRequest("shorter", (5, 6, 7), 20, 1.0, NO_STOP, seed=0))
        await subject.adopt_shared(2, backend, in_flight)
        return whole, [await finish(part, request) for part, request in zip(pending, requests, strict=True)]

    async def finish(pending: Awaitable[Completion], request: GenerationRequest) -> Completion:
        part = await pending
        if part.ending is not Ending.ABORTED:
            return part
        rest = await subject.engine.generate(replace(request, prefix_ids=part.token_ids))
        return replace(
            rest,
            token_ids=part.token_ids + rest.token_ids,
            weights_versions=part.weights_versions + rest.weights_versions,
        )

    whole, resumed = subject.run(across_an_update())
    assert all(len(c.token_ids) == len(c.weights_versions) == 200 for c in resumed)
    assert {version for c in resumed for version in c.weights_versions} == {1, 2}
    if subject.precision is Precision.FLOAT32:
        num_equal = sum(a.token_ids == b.token_ids for a, b in zip(whole, resumed, strict=True))
        assert num_equal >= 20, f"{num_equal} of {len(requests)} completions are the same"
