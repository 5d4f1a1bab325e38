"""Contract of every inference engine: tokens depend on seed and weights alone; logprobs and weights versions are right.

Tests with the fixture `subject` run on every engine; the rehearsal engine runs in virtual time. Tests with `model_subject`
run on engines that have the trainer's model. vLLM starts once per model, since a start takes half a minute. `make test`
starts two: one worker with a dense model, two workers with a mixture of experts.
"""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_core.batching.packing import PackingLimits
from roll_core.batching.samples import demonstration_sample
from roll_core.concurrency import as_they_finish
from roll_core.config.inference import RehearsalInference, VllmInference
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.rollout import InFlightPolicy
from roll_core.config.training.training import Packing, TrainingConfig
from roll_core.errors import EngineDied, WrongWeights
from roll_core.inference import torch_engine
from roll_core.inference.base import InferenceEngine, WeightsUpdate, adopt
from roll_core.inference.rehearsal_engine import RehearsalEngine
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.torch_engine import TorchEngine
from roll_core.inference.vllm import engine as vllm_engine
from roll_core.inference.vllm.engine import VllmEngine
from roll_core.models.characters import VOCABULARY
from roll_core.models.checkpoint_names import is_expert_tensor
from roll_core.simulation.virtual_time import run_in_virtual_time
from roll_core.training.base import Policy
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.trajectory import Ending
from roll_core.weights.buckets import pack, unpack
from roll_core.weights.checks import SAMPLED_TENSORS, CheckRecorder
from tests.contracts.routes import ROUTES, Delivery, Route
from tests.micro_batches import cut
from tests.support import patience

NO_STOP: tuple[int, ...] = ()
CPU = torch.device("cpu")
SLOW_STEP_S = 0.02
"""Seconds per step of a vLLM that a test interrupts: much longer than asking it for the number of its steps."""


def model(architecture: Architecture = Architecture.QWEN3) -> ScratchModel:
    return ScratchModel(architecture=architecture, num_heads=2, num_kv_heads=1, max_positions=48)


def new_torch_engine(num_slots: int = 64, architecture: Architecture = Architecture.QWEN3, seed: int = 0) -> TorchEngine:
    return TorchEngine(model(architecture), seed=seed, num_slots=num_slots, device=CPU, dtype=torch.float32)


def new_trainer(architecture: Architecture = Architecture.QWEN3, temperature: float = 1.0, seed: int = 7) -> TorchBackend:
    settings = TorchSettings(TrainingConfig(), seed=seed, temperature=temperature, device=CPU)
    return TorchBackend(model(architecture), settings)


def make_requests(
    count: int, *, temperature: float = 1.0, max_new_tokens: int = 12, stop=(1, 2, 3, 4)
) -> list[GenerationRequest]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(5, 60) for _ in range(rng.randint(2, 9))) for _ in range(1 + count // 4)]
    return [
        GenerationRequest(f"r{i}", prompts[i // 4], max_new_tokens, temperature, stop, seed=1000 + i) for i in range(count)
    ]


async def generate_all(engine: InferenceEngine, requests: list[GenerationRequest]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


@cache
def weights(seed: int = 7, architecture: Architecture = Architecture.QWEN3) -> list[tuple[str, torch.Tensor]]:
    return list(new_trainer(architecture, seed=seed).weights())


def weights_update(version: int, seed: int = 7, architecture: Architecture = Architecture.QWEN3) -> WeightsUpdate:
    """Build an update as it arrives in a run: weights through buckets, with the trainer's check."""
    recorder = CheckRecorder(version)
    buckets = list(pack(recorder.observe(weights(seed, architecture)), bucket_bytes=10_000))
    return WeightsUpdate(version, unpack(buckets), recorder.check)


# -------------------------------------------------------------------------------------------------- subjects
@dataclass
class Subject:
    """Kind of engine under test, with the event loop in which it runs."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    """Function that runs a coroutine to its end, in real or virtual time."""
    interruptions: range
    """Numbers of steps after which tests interrupt the engine, one after another."""

    async def engine(self, num_slots: int = 64) -> InferenceEngine:
        """Return an engine with weights version 0."""
        raise NotImplementedError

    async def wait_steps(self, engine: InferenceEngine, steps: int) -> None:
        """Wait until the engine has taken some steps, or is idle."""
        raise NotImplementedError

    def run_all(self, requests: list[GenerationRequest], num_slots: int = 64) -> list[Completion]:
        async def ask() -> list[Completion]:
            return await generate_all(await self.engine(num_slots), requests)

        return self.run(ask())


class TorchSubject(Subject):
    def __init__(self, architecture: Architecture = Architecture.QWEN3):
        super().__init__(asyncio.run, range(1, 14, 3))
        self.architecture = architecture
        self.num_workers = 1

    async def engine(self, num_slots: int = 64) -> InferenceEngine:
        return new_torch_engine(num_slots, self.architecture)

    async def wait_steps(self, engine: InferenceEngine, steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)  # the engine yields to the event loop after each step


class RehearsalSubject(Subject):
    def __init__(self) -> None:
        super().__init__(run_in_virtual_time, range(1, 14))

    async def engine(self, num_slots: int = 64) -> InferenceEngine:
        latency = RehearsalInference(seconds_per_token=1.0, seconds_to_first_token=0.25, median_tokens=8, sigma=0.7)
        return RehearsalEngine(latency, num_slots=num_slots)

    async def wait_steps(self, engine: InferenceEngine, steps: int) -> None:
        await asyncio.sleep(float(steps))  # virtual seconds; a token takes one


class VllmSubject(Subject):
    """One vLLM engine for all tests, in one event loop. Each test gets it with its number of slots and weights version 0."""

    def __init__(self, architecture: Architecture, num_workers: int = 1):
        self.architecture = architecture
        self.num_workers = num_workers
        self._runner = asyncio.Runner()
        self._engine: VllmEngine | None = None
        super().__init__(self._runner.run, range(2, 14, 5))

    async def engine(self, num_slots: int = 64) -> InferenceEngine:
        if self._engine is None:
            self._engine = VllmEngine(
                model(self.architecture),
                VllmInference(tensor_parallel=self.num_workers),
                num_slots=128,
                device=CPU,
                dtype=torch.float32,
                num_threads=1,
            )
        self._engine._num_slots = num_slots
        await adopt(self._engine, weights_update(0, seed=0, architecture=self.architecture), InFlightPolicy.FINISH)
        return self._engine

    async def wait_steps(self, engine: InferenceEngine, steps: int) -> None:
        assert isinstance(engine, VllmEngine)
        await engine._llm.collective_rpc("slow_down", args=(SLOW_STEP_S,))
        before, *_ = await engine._llm.collective_rpc("count_steps")
        while engine._running:
            now, *_ = await engine._llm.collective_rpc("count_steps")
            if now - before >= steps:
                break
        await engine._llm.collective_rpc("slow_down", args=(0.0,))

    def discard_engine(self) -> None:
        """Close the engine; the next test starts another."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        self.discard_engine()
        self._runner.close()


@pytest.fixture(scope="module")
def vllm_subjects() -> Iterator[dict[str, VllmSubject]]:
    vllm_engine.WORKER = "tests.contracts.slow_worker.SlowWorker"
    subjects = {
        "vllm": VllmSubject(Architecture.QWEN3),
        "vllm moe": VllmSubject(Architecture.QWEN3_MOE),
        "vllm of 2 workers": VllmSubject(Architecture.QWEN3, num_workers=2),
        "vllm moe of 2 workers": VllmSubject(Architecture.QWEN3_MOE, num_workers=2),
    }
    yield subjects
    for one in subjects.values():
        one.close()


@pytest.fixture(params=["torch", "rehearsal", "vllm"])
def subject(request: pytest.FixtureRequest, vllm_subjects: dict[str, VllmSubject]) -> Subject:
    return {"torch": TorchSubject(), "rehearsal": RehearsalSubject(), **vllm_subjects}[request.param]


def exhaustive(name: str) -> Any:
    """Parameter that only `make test-all` uses."""
    return pytest.param(name, marks=pytest.mark.exhaustive)


@pytest.fixture(
    params=[
        "torch",
        "torch moe",
        "torch llama",
        "vllm",
        exhaustive("vllm moe"),
        exhaustive("vllm of 2 workers"),
        exhaustive("vllm moe of 2 workers"),
    ]
)
def model_subject(request: pytest.FixtureRequest, vllm_subjects: dict[str, VllmSubject]) -> TorchSubject | VllmSubject:
    return {
        "torch": TorchSubject(),
        "torch moe": TorchSubject(Architecture.QWEN3_MOE),
        "torch llama": TorchSubject(Architecture.LLAMA),
        **vllm_subjects,
    }[request.param]


# -------------------------------------------------------------------------------------------------- tokens
@pytest.mark.parametrize("num_slots", [3, 64])
def test_tokens_do_not_depend_on_how_many_sequences_share_the_engine(subject, num_slots):
    requests = make_requests(20)
    alone = subject.run_all(requests, num_slots=1)
    together = subject.run_all(requests, num_slots)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_prompts_too_many_for_one_step_are_computed_in_parts(subject):
    """Prompts of 4,096 tokens in all: twice what vLLM computes in one step."""
    requests = [
        GenerationRequest(str(i), tuple(random.Random(i).choices(range(5, 60), k=32)), 8, 1.0, NO_STOP, seed=i)
        for i in range(128)
    ]
    alone = subject.run_all(requests, num_slots=16)
    assert [c.token_ids for c in subject.run_all(requests, num_slots=128)] == [c.token_ids for c in alone]


def test_a_seed_reproduces_its_tokens_and_another_seed_gives_others(subject):
    requests = make_requests(8, stop=NO_STOP)
    first, again = subject.run_all(requests), subject.run_all(requests)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.token_ids for c in first}) == 8


def test_generation_ends_at_a_stop_token_or_at_its_length(subject):
    requests = make_requests(40)
    completions = subject.run_all(requests)
    assert {completion.ending for completion in completions} == {Ending.STOP, Ending.LENGTH}
    for request, completion in zip(requests, completions, strict=True):
        stopped = completion.token_ids[-1] in request.stop_token_ids
        assert not set(completion.token_ids[:-1]) & set(request.stop_token_ids)
        assert completion.ending is (Ending.STOP if stopped else Ending.LENGTH)
        assert stopped or len(completion.token_ids) == request.max_new_tokens


def test_a_finished_sequence_frees_its_slot_at_once(subject):
    """Two slots, one long request and many short ones. An engine that waits for its batch finishes one short one before the
    long one; how many more there are depends on how soon this process asks for them."""

    async def finish_order() -> list[str]:
        engine, order = await subject.engine(2), []
        long = GenerationRequest("long", (5, 6), 40, 1.0, NO_STOP, seed=1)
        short = [GenerationRequest(f"short {i}", (5, 6), 3, 1.0, NO_STOP, seed=i) for i in range(8)]

        async def one(request: GenerationRequest) -> None:
            await engine.generate(request)
            order.append(request.request_id)

        await asyncio.gather(*(one(request) for request in [long, *short]))
        return order

    assert subject.run(finish_order()).index("long") > 1


def test_completions_of_many_requests_are_returned_as_they_finish(subject):
    """A role returns the first completions while the other requests are still in flight."""
    lengths = {"long": 40, "short": 2, "middling": 12}
    requests = [GenerationRequest(name, (5, 6), length, 1.0, NO_STOP, seed=1) for name, length in lengths.items()]

    async def order() -> list[tuple[str, int]]:
        engine = await subject.engine()
        streamed = as_they_finish(engine.generate(request) for request in requests)
        return [(c.request_id, len(c.token_ids)) async for together in streamed for c in together]

    assert subject.run(order()) == [("short", 2), ("middling", 12), ("long", 40)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_logprobs_match_for_every_token_after_several_updates(model_subject, temperature):
    """Each update has other weights: tied embeddings, fused matrices and experts must be updated too."""
    architecture, requests = model_subject.architecture, make_requests(24, temperature=temperature)

    async def after_updates() -> list[Completion]:
        engine = await model_subject.engine(5)
        for version in (1, 2, 3):
            await adopt(engine, weights_update(version, seed=version, architecture=architecture), InFlightPolicy.FINISH)
        return await generate_all(engine, requests)

    backend = new_trainer(architecture, temperature, seed=3)
    for request, completion in zip(requests, model_subject.run(after_updates()), strict=True):
        (batch,) = cut(
            [demonstration_sample(request.prompt_ids, completion.token_ids)], PackingLimits(1000, None, Packing.ROWS)
        )
        difference = backend.logprobs([batch], Policy.CURRENT)[0] - torch.tensor(completion.sampler_logprobs)
        assert difference.abs().max().item() < 1e-4


def test_a_cached_prompt_is_computed_again_after_new_weights(model_subject):
    """The prompt is long enough for the prefix cache, whose entries new weights must invalidate."""
    architecture, prompt = model_subject.architecture, tuple(random.Random(3).choices(range(5, 60), k=36))
    requests = [GenerationRequest(str(seed), prompt, 8, 1.0, NO_STOP, seed=seed) for seed in range(4)]

    async def before_and_after() -> list[Completion]:
        engine = await model_subject.engine(2)
        await generate_all(engine, requests)
        await adopt(engine, weights_update(1, seed=3, architecture=architecture), InFlightPolicy.FINISH)
        return await generate_all(engine, requests)

    backend = new_trainer(architecture, seed=3)
    for completion in model_subject.run(before_and_after()):
        (batch,) = cut([demonstration_sample(prompt, completion.token_ids)], PackingLimits(1000, None, Packing.ROWS))
        difference = backend.logprobs([batch], Policy.CURRENT)[0] - torch.tensor(completion.sampler_logprobs)
        assert difference.abs().max().item() < 1e-4


def test_all_engines_draw_the_same_tokens_from_the_same_weights(vllm_subjects):
    """Tokens are equal, not only equally distributed: the choice of the engine does not change what a run learns."""
    requests = [*make_requests(40), *make_requests(8, temperature=0.0)]
    by_torch, by_vllm = (subject.run_all(requests) for subject in (TorchSubject(), vllm_subjects["vllm"]))
    assert [c.token_ids for c in by_vllm] == [c.token_ids for c in by_torch]


def logits_after(prompt: tuple[int, ...]) -> torch.Tensor:
    """Logits at every position of a prompt, by the weights that engines start with."""
    with torch.no_grad():
        return new_torch_engine()._model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_greedy_takes_the_likeliest_token(kind, vllm_subjects):
    request = GenerationRequest("greedy", (5, 9, 11), 6, 0.0, NO_STOP, seed=1)
    (completion,) = {"torch": TorchSubject(), **vllm_subjects}[kind].run_all([request])
    best = logits_after((*request.prompt_ids, *completion.token_ids)).argmax(-1).tolist()
    assert list(completion.token_ids) == best[2:-1]


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_sampling_follows_the_distribution(kind, vllm_subjects):
    """2,000 first tokens of one prompt against the model's own probabilities, by a chi-square bound."""
    requests = [GenerationRequest(str(i), (5, 9), 1, 1.0, NO_STOP, seed=i) for i in range(2000)]
    completions = {"torch": TorchSubject(), **vllm_subjects}[kind].run_all(requests)
    probabilities = logits_after((5, 9))[-1].softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(completions)
    common = expected >= 5
    chi_square = ((counts - expected)[common].square() / expected[common]).sum().item()
    freedom = int(common.sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


# -------------------------------------------------------------------------------------------------- updates of weights
def test_every_token_carries_the_version_that_produced_it_when_generation_continues(subject):
    async def across_an_update() -> Completion:
        engine = await subject.engine()
        pending = asyncio.create_task(engine.generate(GenerationRequest("a", (5, 6), 12, 1.0, NO_STOP, seed=1)))
        await subject.wait_steps(engine, 5)
        await adopt(engine, weights_update(4), InFlightPolicy.CONTINUE)
        return await pending

    versions = subject.run(across_an_update()).weights_versions
    assert set(versions) == {0, 4}
    assert list(versions) == sorted(versions)
    assert len(versions) == 12


def test_finish_lets_running_requests_end_with_the_weights_they_began_with(subject):
    async def across_an_update() -> list[Completion]:
        engine = await subject.engine(2)
        requests = [GenerationRequest(str(i), (5, 6), 6, 1.0, NO_STOP, seed=i) for i in range(4)]
        pending = [asyncio.create_task(engine.generate(request)) for request in requests]
        await subject.wait_steps(engine, 3)
        await adopt(engine, weights_update(4), InFlightPolicy.FINISH)
        return await asyncio.gather(*pending)

    completions = subject.run(across_an_update())
    assert [set(c.weights_versions) for c in completions] == [{0}, {0}, {4}, {4}]


def test_resume_ends_running_requests_with_what_they_have_and_starts_waiting_ones_with_the_new_weights(subject):
    async def across_an_update() -> list[Completion]:
        engine = await subject.engine(2)
        requests = [GenerationRequest(str(i), (5, 6), 30, 1.0, NO_STOP, seed=i) for i in range(4)]
        pending = [asyncio.create_task(engine.generate(request)) for request in requests]
        await subject.wait_steps(engine, 5)
        await adopt(engine, weights_update(4), InFlightPolicy.RESUME)
        return await asyncio.gather(*pending)

    *interrupted, third, fourth = subject.run(across_an_update())
    for completion in interrupted:
        assert completion.ending is Ending.ABORTED
        assert 0 < len(completion.token_ids) < 30
        assert set(completion.weights_versions) == {0}
    for completion in (third, fourth):
        assert completion.ending is Ending.LENGTH
        assert completion.weights_versions == (4,) * 30


def join_parts(parts: list[Completion]) -> Completion:
    return Completion(
        parts[0].request_id,
        token_ids=sum((part.token_ids for part in parts), ()),
        sampler_logprobs=sum((part.sampler_logprobs for part in parts), ()),
        weights_versions=sum((part.weights_versions for part in parts), ()),
        ending=parts[-1].ending,
    )


async def generate_in_pieces(
    subject: Subject,
    engine: InferenceEngine,
    requests: list[GenerationRequest],
    interrupt: Callable[[], Awaitable[None]],
    at: int,
) -> list[Completion]:
    """Interrupt all requests after `at` steps and then every four, and resume them, until all have ended by themselves."""
    parts: dict[str, list[Completion]] = {request.request_id: [] for request in requests}
    pending = {asyncio.create_task(engine.generate(request)): request for request in requests}
    await subject.wait_steps(engine, at)
    while pending:
        await interrupt()
        await asyncio.sleep(0)
        for task in [task for task in pending if task.done()]:
            request, part = pending.pop(task), task.result()
            parts[request.request_id].append(part)
            if part.ending is Ending.ABORTED:
                rest = replace(request, prefix_ids=request.prefix_ids + part.token_ids)
                pending[asyncio.create_task(engine.generate(rest))] = rest
        await subject.wait_steps(engine, 4)
    return [join_parts(parts[request.request_id]) for request in requests]


@pytest.mark.parametrize("num_slots", [3, 64])
@pytest.mark.parametrize("how", ["abort", "adopt"])
def test_a_request_interrupted_anywhere_and_resumed_gives_the_tokens_of_an_uninterrupted_one(subject, how, num_slots):
    requests = make_requests(12, max_new_tokens=14)

    async def uninterrupted() -> list[Completion]:
        engine = await subject.engine(num_slots)
        await adopt(engine, weights_update(1), InFlightPolicy.FINISH)
        return await generate_all(engine, requests)

    async def interrupted(at: int) -> list[Completion]:
        engine, version = await subject.engine(num_slots), 1
        await adopt(engine, weights_update(version), InFlightPolicy.FINISH)

        async def interrupt() -> None:
            nonlocal version
            if how == "abort":
                await engine.abort(*(request.request_id for request in requests))
            else:
                version += 1
                await adopt(engine, weights_update(version), InFlightPolicy.RESUME)

        return await generate_in_pieces(subject, engine, requests, interrupt, at)

    whole = subject.run(uninterrupted())
    for at in subject.interruptions:
        for expected, pieces in zip(whole, subject.run(interrupted(at)), strict=True):
            assert pieces.token_ids == expected.token_ids
            assert pieces.sampler_logprobs == pytest.approx(expected.sampler_logprobs, abs=1e-5)
            assert pieces.ending is expected.ending


def test_a_resumed_completion_has_only_the_new_tokens_each_with_its_weights_version(subject):
    request = GenerationRequest("a", (5, 6), 12, 1.0, NO_STOP, seed=1)

    async def across_an_update() -> tuple[Completion, Completion]:
        engine = await subject.engine()
        pending = asyncio.create_task(engine.generate(request))
        await subject.wait_steps(engine, 6)
        await adopt(engine, weights_update(4), InFlightPolicy.RESUME)
        first = await pending
        return first, await engine.generate(replace(request, prefix_ids=first.token_ids))

    first, rest = subject.run(across_an_update())
    assert first.weights_versions == (0,) * len(first.token_ids)
    assert rest.weights_versions == (4,) * (12 - len(first.token_ids))
    assert len(rest.token_ids) == len(rest.sampler_logprobs) == 12 - len(first.token_ids)
    assert rest.ending is Ending.LENGTH


def test_a_completion_that_has_ended_cannot_be_resumed():
    with pytest.raises(AssertionError, match="a ended already, with a stop"):
        GenerationRequest("a", (5, 6), 12, 1.0, (1, 2), seed=1, prefix_ids=(7, 2))
    with pytest.raises(AssertionError, match="a has all of its 3 tokens already"):
        GenerationRequest("a", (5, 6), 3, 1.0, (1,), seed=1, prefix_ids=(7, 8, 9))


def test_contexts_too_many_for_one_prefill_are_prefilled_in_parts(monkeypatch):
    requests = make_requests(20)
    at_once = TorchSubject().run_all(requests)
    monkeypatch.setattr(torch_engine, "PREFILL_TOKENS", 8)
    assert [c.token_ids for c in TorchSubject().run_all(requests)] == [c.token_ids for c in at_once]


def test_an_aborted_request_ends_alone(subject):
    async def abort_one() -> list[Completion]:
        engine = await subject.engine(2)
        requests = [GenerationRequest(str(i), (5, 6), 10, 1.0, NO_STOP, seed=i) for i in range(3)]
        pending = [asyncio.create_task(engine.generate(request)) for request in requests]
        await subject.wait_steps(engine, 4)
        await engine.abort("0")
        await engine.abort("2")
        await engine.abort("unknown")
        return await asyncio.gather(*pending)

    first, second, third = subject.run(abort_one())
    assert [first.ending, second.ending, third.ending] == [Ending.ABORTED, Ending.LENGTH, Ending.ABORTED]
    (alone,) = subject.run_all([GenerationRequest("1", (5, 6), 10, 1.0, NO_STOP, seed=1)])
    assert second.token_ids == alone.token_ids


def test_sleep_with_a_request_in_flight_is_refused(subject):
    async def fall_asleep() -> list[Completion]:
        engine = await subject.engine(1)
        pending = [asyncio.create_task(engine.generate(request)) for request in make_requests(3, stop=NO_STOP)]
        await subject.wait_steps(engine, 3)
        with pytest.raises(AssertionError, match="must not sleep with 3 requests in flight"):
            await engine.sleep()
        completions = await asyncio.gather(*pending)
        await engine.sleep()
        await engine.wake()
        return completions

    assert [len(completion.token_ids) for completion in subject.run(fall_asleep())] == [12, 12, 12]


def test_an_engine_that_slept_generates_nothing_before_it_has_new_weights(subject):
    async def wake_without() -> Completion:
        engine = await subject.engine(1)
        await engine.sleep()
        await engine.wake()
        early = asyncio.create_task(engine.generate(GenerationRequest("early", (5, 6), 10, 1.0, NO_STOP, seed=1)))
        await asyncio.sleep(0)
        await adopt(engine, weights_update(7), InFlightPolicy.FINISH)
        return await early

    assert set(subject.run(wake_without()).weights_versions) == {7}


def test_a_cancelled_request_frees_its_slot(subject):
    async def cancel_one() -> Completion:
        engine = await subject.engine(1)
        cancelled = asyncio.create_task(engine.generate(GenerationRequest("cancelled", (5, 6), 40, 1.0, NO_STOP, seed=1)))
        await subject.wait_steps(engine, 3)
        cancelled.cancel()
        completion = await engine.generate(GenerationRequest("next", (5, 6), 3, 1.0, NO_STOP, seed=2))
        await engine.sleep()
        return completion

    assert len(subject.run(cancel_one()).token_ids) == 3


def test_some_of_64_concurrent_requests_are_aborted(subject):
    unwanted = {f"{i}" for i in range(0, 64, 8)}

    async def abort_some() -> list[Completion]:
        engine = await subject.engine(64)
        requests = [GenerationRequest(str(i), (5, 6 + i % 7), 30, 1.0, NO_STOP, seed=i) for i in range(64)]
        pending = [asyncio.create_task(engine.generate(request)) for request in requests]
        await subject.wait_steps(engine, 4)
        for one in sorted(unwanted):
            await engine.abort(one)
        return await asyncio.gather(*pending)

    completions = subject.run(abort_some())
    assert {c.request_id for c in completions if c.ending is Ending.ABORTED} == unwanted
    assert all(len(c.token_ids) == 30 for c in completions if c.ending is Ending.LENGTH)
    assert all(len(c.token_ids) == len(c.sampler_logprobs) == len(c.weights_versions) for c in completions)


def test_new_weights_change_what_is_generated_and_sleep_changes_nothing(model_subject):
    architecture = model_subject.architecture

    async def three_times() -> list[tuple[tuple[int, ...], ...]]:
        engine, requests = await model_subject.engine(), make_requests(4, stop=NO_STOP)
        before = await generate_all(engine, requests)
        await engine.sleep()
        await adopt(engine, weights_update(1, seed=0, architecture=architecture), InFlightPolicy.FINISH)
        await engine.wake()
        after_sleep = await generate_all(engine, requests)
        await adopt(engine, weights_update(2, seed=2, architecture=architecture), InFlightPolicy.FINISH)
        return [tuple(c.token_ids for c in batch) for batch in (before, after_sleep, await generate_all(engine, requests))]

    before, after_sleep, other_weights = model_subject.run(three_times())
    assert before == after_sleep
    assert before != other_weights


# -------------------------------------------------------------------------------------------------- damaged weights
def distinct_weights(architecture: Architecture) -> list[tuple[str, torch.Tensor]]:
    """Weights with noise. Without it, new norms have equal elements, and permuting them would change nothing."""
    generator = torch.Generator().manual_seed(1)
    return [(name, t + 0.1 * torch.rand(t.shape, generator=generator)) for name, t in weights(7, architecture)]


def permute_columns(tensors: list[tuple[str, torch.Tensor]], name: str) -> list[tuple[str, torch.Tensor]]:
    """Rotate the columns of the tensor `name` by one."""
    return [(n, t.roll(1, dims=-1) if n == name else t) for n, t in tensors]


def test_damaged_weights_are_refused_by_name_and_nothing_is_generated_with_them(model_subject):
    architecture = model_subject.architecture
    whole = distinct_weights(architecture)

    async def refused() -> None:
        engine = await model_subject.engine()
        num_damaged = {False: 0, True: 0}  # by whether it is a tensor of experts
        for version in range(1, 6):
            recorder = CheckRecorder(version)
            list(recorder.observe(whole))
            for name in (sample.name for sample in recorder.check.samples):
                num_damaged[is_expert_tensor(name)] += 1
                with pytest.raises(WrongWeights, match=f"weights version {version} differs .*{name}"):
                    await adopt(
                        engine, WeightsUpdate(version, permute_columns(whole, name), recorder.check), InFlightPolicy.FINISH
                    )
        assert num_damaged == {
            False: 5 * SAMPLED_TENSORS,
            True: 5 * SAMPLED_TENSORS if architecture is Architecture.QWEN3_MOE else 0,
        }
        pending = asyncio.create_task(engine.generate(make_requests(1)[0]))
        done, _ = await asyncio.wait([pending], timeout=0.2)
        assert not done, "an engine with damaged weights generated"
        await adopt(engine, weights_update(9, architecture=architecture), InFlightPolicy.FINISH)
        assert set((await pending).weights_versions) == {9}

    model_subject.run(refused())


@pytest.fixture(params=["torch", "vllm", exhaustive("vllm of 2 workers"), exhaustive("vllm moe of 2 workers")])
def routed_subject(request: pytest.FixtureRequest, vllm_subjects: dict[str, VllmSubject]) -> TorchSubject | VllmSubject:
    return {"torch": TorchSubject(), **vllm_subjects}[request.param]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, routed_subject: TorchSubject | VllmSubject, tmp_path: Path) -> Route:
    """Route to the engine of `routed_subject`."""
    return ROUTES[request.param](tmp_path, routed_subject.num_workers)


def test_every_route_delivers_the_weights_that_were_sent(routed_subject, route):
    requests, architecture = make_requests(8), routed_subject.architecture

    async def after_deliveries() -> list[Completion]:
        engine = await routed_subject.engine()
        for version in (1, 2):
            sent = weights(version, architecture)
            await route.deliver(engine, Delivery(version, sent, checked=sent))
        return await generate_all(engine, requests)

    async def after_adopting() -> list[Completion]:
        engine = await routed_subject.engine()
        await adopt(engine, weights_update(2, seed=2, architecture=architecture), InFlightPolicy.FINISH)
        return await generate_all(engine, requests)

    assert routed_subject.run(after_deliveries()) == routed_subject.run(after_adopting())


def test_a_permuted_tensor_is_refused_by_name_on_every_route(routed_subject, route):
    whole = distinct_weights(routed_subject.architecture)
    name = Delivery(2, whole, whole).check.samples[0].name

    async def refused() -> None:
        engine = await routed_subject.engine()
        await route.deliver(engine, Delivery(1, whole, checked=whole))
        with pytest.raises(WrongWeights, match=f"weights version 2 differs .*{name}"):
            await route.deliver(engine, Delivery(2, permute_columns(whole, name), checked=whole))

    routed_subject.run(refused())


def test_a_lost_bucket_is_named_on_every_route(routed_subject, route):
    whole = weights(7, routed_subject.architecture)
    lost, _ = whole[len(whole) // 2]

    async def refused() -> None:
        engine = await routed_subject.engine()
        with pytest.raises(WrongWeights, match=f"weights version 1 lacks .*{lost}"):
            await route.deliver(engine, Delivery(1, whole, checked=whole, lost=lost))

    routed_subject.run(refused())


def test_an_old_version_under_a_new_number_is_refused_on_every_route(routed_subject, route):
    old, new = weights(7, routed_subject.architecture), weights(8, routed_subject.architecture)

    async def refused() -> None:
        engine = await routed_subject.engine()
        await route.deliver(engine, Delivery(1, old, checked=old))
        with pytest.raises(WrongWeights, match="weights version 2 differs from the trainer's: "):
            await route.deliver(engine, Delivery(2, old, checked=new))

    routed_subject.run(refused())


def test_an_interrupted_update_is_repeated_from_its_beginning(model_subject):
    """Half of a layer's tensors are loaded when the next update begins."""
    architecture, requests = model_subject.architecture, make_requests(8)

    async def tokens(interrupted: bool) -> list[tuple[int, ...]]:
        engine = await model_subject.engine()
        if interrupted:
            buckets = list(pack(weights(2, architecture), bucket_bytes=1))  # one tensor per bucket
            await engine.begin_update(InFlightPolicy.FINISH)
            for bucket in buckets[: len(buckets) // 2]:
                await engine.load(bucket)
        await adopt(engine, weights_update(3, 3, architecture), InFlightPolicy.FINISH)
        return [c.token_ids for c in await generate_all(engine, requests)]

    assert model_subject.run(tokens(interrupted=True)) == model_subject.run(tokens(interrupted=False))


def test_a_request_that_cannot_fit_is_refused_by_name(model_subject):
    with pytest.raises(ValueError, match="request r0 may reach 50 tokens, but model.max_positions is 48"):
        model_subject.run_all([GenerationRequest("r0", (5, 6), 48, 1.0, NO_STOP, seed=1)])


@pytest.mark.parametrize("token", [-1, len(VOCABULARY)])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_request_with_an_unknown_token_is_refused_and_other_requests_are_not(model_subject, token, prefix):
    (right,) = make_requests(1, stop=NO_STOP)
    wrong = replace(right, request_id="wrong", **{"prefix_ids" if prefix else "prompt_ids": (5, token)})

    async def ask() -> list[BaseException | Completion]:
        engine = await model_subject.engine(1)
        return await asyncio.gather(engine.generate(wrong), engine.generate(right), return_exceptions=True)

    refused, completion = model_subject.run(ask())
    assert isinstance(refused, ValueError)
    assert str(refused) == f"request wrong has token {token}, but the model knows 0 to {len(VOCABULARY) - 1}"
    assert len(completion.token_ids) == right.max_new_tokens


# -------------------------------------------------------------------------------------------------- pings and failures
def test_an_engine_replies_to_a_ping_while_idle_generating_and_asleep(subject):
    async def ask() -> Completion:
        engine = await subject.engine(1)
        await engine.ping()
        pending = asyncio.create_task(engine.generate(make_requests(1, stop=NO_STOP)[0]))
        await subject.wait_steps(engine, 3)
        await engine.ping()
        completion = await pending
        await engine.sleep()
        await engine.ping()
        await engine.wake()
        return completion

    assert len(subject.run(ask()).token_ids) == 12


def test_an_engine_whose_vllm_process_hangs_does_not_reply_to_a_ping(vllm_subjects):
    subject = vllm_subjects["vllm"]

    async def ask() -> None:
        engine = await subject.engine()
        (pid,) = await engine._llm.collective_rpc("process_id")
        os.kill(pid, signal.SIGSTOP)
        try:
            ping = asyncio.create_task(engine.ping())
            done, _ = await asyncio.wait([ping], timeout=0.5)
            assert not done, "it replied for a process that is stopped"
        finally:
            os.kill(pid, signal.SIGCONT)
        await ping

    subject.run(ask())


def test_a_step_that_fails_fails_every_request_it_held():
    engine = new_torch_engine(2)
    engine._model.get_output_embeddings().forward = lambda _: 1 / 0

    async def all_failures() -> list[BaseException]:
        pending = [asyncio.create_task(engine.generate(request)) for request in make_requests(5)]
        done, _ = await asyncio.wait(pending, timeout=patience(60))
        return [task.exception() for task in done]

    assert [type(error) for error in asyncio.run(all_failures())] == [ZeroDivisionError] * 5


def test_every_call_raises_when_the_process_of_vllm_is_killed(vllm_subjects):
    subject = vllm_subjects["vllm"]

    async def kill_it() -> list[BaseException | Completion]:
        engine = await subject.engine(2)
        await engine._llm.collective_rpc("slow_down", args=(SLOW_STEP_S,))
        pending = [asyncio.create_task(engine.generate(request)) for request in make_requests(5, stop=NO_STOP)]
        await asyncio.sleep(0)
        (pid,) = await engine._llm.collective_rpc("process_id")
        os.kill(pid, signal.SIGKILL)
        failures = await asyncio.gather(*pending, return_exceptions=True)
        with pytest.raises(EngineDied, match="vLLM's process ended"):
            await engine.begin_update(InFlightPolicy.FINISH)
        return failures

    failures = subject.run(kill_it())
    assert [type(failure) for failure in failures] == [EngineDied] * 5
    subject.discard_engine()


def test_a_request_that_vllm_refuses_raises_and_frees_its_slot(vllm_subjects):
    subject, (right,) = vllm_subjects["vllm"], make_requests(1)
    without_prompt = GenerationRequest("nothing", (), 4, 1.0, NO_STOP, seed=1)

    async def ask() -> list[BaseException | Completion]:
        engine = await subject.engine(1)
        requests = (without_prompt, right)
        results = await asyncio.gather(*(engine.generate(request) for request in requests), return_exceptions=True)
        await engine.sleep()  # would raise if a request were in flight
        return results

    refused, completion = subject.run(ask())
    assert "empty" in str(refused)
    assert isinstance(completion, Completion)
