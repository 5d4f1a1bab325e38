"""What every inference engine must do: tokens that depend on seed and weights alone, honest logprobs, honest versions.

Tests that take a `subject` are about every engine, the rehearsal's in virtual time. Those about what a model says of its
tokens are about engines that have one.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from roll_core.batching.demonstrations import as_sample
from roll_core.batching.packing import PackingLimits
from roll_core.config.inference import RehearsalInference
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.rollout import InFlight
from roll_core.config.training import Packing, TrainingConfig
from roll_core.inference import torch_engine
from roll_core.inference.base import InferenceEngine, WeightsUpdate
from roll_core.inference.rehearsal_engine import RehearsalEngine
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.torch_engine import TorchEngine
from roll_core.planning.virtual_time import run_in_virtual_time
from roll_core.training.base import Policy
from roll_core.training.torch_backend import TorchBackend
from roll_core.training.torch_trained import TorchSettings
from roll_core.types.trajectory import Ending
from roll_core.weights.buckets import pack, unpack
from tests.micro_batches import cut

NO_STOP: tuple[int, ...] = ()


def model(architecture: Architecture = Architecture.QWEN3) -> ScratchModel:
    return ScratchModel(architecture=architecture, max_positions=48)


def engine(num_slots: int = 64, architecture: Architecture = Architecture.QWEN3, seed: int = 0) -> TorchEngine:
    return TorchEngine(model(architecture), seed=seed, num_slots=num_slots, device=torch.device("cpu"), dtype=torch.float32)


def trainer(architecture: Architecture = Architecture.QWEN3, temperature: float = 1.0, seed: int = 7) -> TorchBackend:
    settings = TorchSettings(TrainingConfig(), seed=seed, temperature=temperature, device=torch.device("cpu"))
    return TorchBackend(model(architecture), settings)


def requests(
    count: int, *, temperature: float = 1.0, max_new_tokens: int = 12, stop=(1, 2, 3, 4)
) -> list[GenerationRequest]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(5, 60) for _ in range(rng.randint(2, 9))) for _ in range(1 + count // 4)]
    return [
        GenerationRequest(f"r{i}", prompts[i // 4], max_new_tokens, temperature, stop, seed=1000 + i) for i in range(count)
    ]


async def generate_all(served: InferenceEngine, asked: list[GenerationRequest]) -> list[Completion]:
    return await asyncio.gather(*(served.generate(request) for request in asked))


def run_all(served: TorchEngine, asked: list[GenerationRequest]) -> list[Completion]:
    return asyncio.run(generate_all(served, asked))


@cache
def weights(seed: int = 7) -> list[tuple[str, torch.Tensor]]:
    return list(trainer(seed=seed).weights())


def rehearsal(num_slots: int = 64) -> RehearsalEngine:
    latency = RehearsalInference(seconds_per_token=1.0, seconds_to_first_token=0.25, median_tokens=8, sigma=0.7)
    return RehearsalEngine(latency, num_slots=num_slots)


@dataclass(frozen=True)
class Subject:
    """An engine under test, and the time it lives in."""

    engine: Callable[..., InferenceEngine]
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    step_seconds: float
    """What passes while it makes a token; 0: it yields to the event loop after each."""

    async def settled(self, steps: int) -> None:
        """Let the engine take some steps."""
        for _ in range(steps):
            await asyncio.sleep(self.step_seconds)

    def run_all(self, asked: list[GenerationRequest], num_slots: int = 64) -> list[Completion]:
        async def ask() -> list[Completion]:
            return await generate_all(self.engine(num_slots), asked)

        return self.run(ask())


SUBJECTS = {"torch": Subject(engine, asyncio.run, 0.0), "rehearsal": Subject(rehearsal, run_in_virtual_time, 1.0)}


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]


@pytest.mark.parametrize("num_slots", [1, 3, 64])
def test_tokens_do_not_depend_on_how_many_sequences_share_the_engine(subject, num_slots):
    asked = requests(20)
    alone = subject.run_all(asked, num_slots=1)
    together = subject.run_all(asked, num_slots)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_a_seed_gives_its_tokens_again_and_another_seed_others(subject):
    asked = requests(8, stop=NO_STOP)
    first, again = subject.run_all(asked), subject.run_all(asked)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.token_ids for c in first}) == 8


def test_generation_ends_at_a_stop_token_or_at_its_length(subject):
    asked = requests(40)
    completions = subject.run_all(asked)
    assert {completion.ending for completion in completions} == {Ending.STOP, Ending.LENGTH}
    for request, completion in zip(asked, completions, strict=True):
        stopped = completion.token_ids[-1] in request.stop_token_ids
        assert not set(completion.token_ids[:-1]) & set(request.stop_token_ids)
        assert completion.ending is (Ending.STOP if stopped else Ending.LENGTH)
        assert stopped or len(completion.token_ids) == request.max_new_tokens


def test_a_finished_sequence_makes_room_at_once(subject):
    """With two slots, one long request and many short ones: the short ones all finish while the long one still runs."""

    async def finish_order() -> list[str]:
        served, order = subject.engine(2), []
        long = GenerationRequest("long", (5, 6), 40, 1.0, NO_STOP, seed=1)
        short = [GenerationRequest(f"short {i}", (5, 6), 3, 1.0, NO_STOP, seed=i) for i in range(8)]

        async def one(request: GenerationRequest) -> None:
            await served.generate(request)
            order.append(request.request_id)

        await asyncio.gather(*(one(request) for request in [long, *short]))
        return order

    assert subject.run(finish_order())[-1] == "long"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("architecture", list(Architecture))
def test_sampler_and_trainer_agree_on_the_logprob_of_every_token(architecture, temperature):
    backend, served = trainer(architecture, temperature), engine(5, architecture)
    asked = requests(24, temperature=temperature)

    async def sample() -> list[Completion]:
        await served.adopt(WeightsUpdate(1, unpack(pack(backend.weights(), bucket_bytes=10_000))), InFlight.FINISH)
        return await generate_all(served, asked)

    completions = asyncio.run(sample())
    for request, completion in zip(asked, completions, strict=True):
        sample = as_sample(request.prompt_ids, completion.token_ids)
        (batch,) = cut([sample], PackingLimits(1000, None, Packing.ROWS))
        difference = backend.logprobs(batch, Policy.CURRENT) - torch.tensor(completion.sampler_logprobs)
        assert difference.abs().max().item() < 1e-4


def test_greedy_takes_the_likeliest_token():
    served = engine()
    request = GenerationRequest("greedy", (5, 9, 11), 6, 0.0, NO_STOP, seed=1)
    (completion,) = run_all(served, [request])
    tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        best = served._model(tokens).logits[0].argmax(-1).tolist()
    assert list(completion.token_ids) == best[2:-1]


def test_sampling_follows_the_distribution():
    """2,000 first tokens of one prompt against the model's own probabilities, by a chi-square bound."""
    served = engine(256)
    asked = [GenerationRequest(str(i), (5, 9), 1, 1.0, NO_STOP, seed=i) for i in range(2000)]
    drawn = [c.token_ids[0] for c in run_all(served, asked)]
    with torch.no_grad():
        probabilities = served._model(torch.tensor([[5, 9]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(drawn)
    common = expected >= 5
    chi_square = ((counts - expected)[common].square() / expected[common]).sum().item()
    freedom = int(common.sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_every_token_carries_the_version_that_produced_it_when_generation_continues(subject):
    async def across_an_update() -> Completion:
        served = subject.engine()
        pending = asyncio.create_task(served.generate(GenerationRequest("a", (5, 6), 12, 1.0, NO_STOP, seed=1)))
        await subject.settled(5)
        await served.adopt(WeightsUpdate(4, weights()), InFlight.CONTINUE)
        return await pending

    versions = subject.run(across_an_update()).weights_versions
    assert set(versions) == {0, 4}
    assert list(versions) == sorted(versions)
    assert len(versions) == 12


def test_finish_lets_running_requests_end_with_the_weights_they_began_with(subject):
    async def across_an_update() -> list[Completion]:
        served = subject.engine(2)
        asked = [GenerationRequest(str(i), (5, 6), 6, 1.0, NO_STOP, seed=i) for i in range(4)]
        pending = [asyncio.create_task(served.generate(request)) for request in asked]
        await subject.settled(3)
        await served.adopt(WeightsUpdate(4, weights()), InFlight.FINISH)
        return await asyncio.gather(*pending)

    completions = subject.run(across_an_update())
    assert [set(c.weights_versions) for c in completions] == [{0}, {0}, {4}, {4}]


def test_resume_ends_running_requests_with_what_they_have_and_starts_waiting_ones_with_the_new_weights(subject):
    async def across_an_update() -> list[Completion]:
        served = subject.engine(2)
        asked = [GenerationRequest(str(i), (5, 6), 30, 1.0, NO_STOP, seed=i) for i in range(4)]
        pending = [asyncio.create_task(served.generate(request)) for request in asked]
        await subject.settled(5)
        await served.adopt(WeightsUpdate(4, weights()), InFlight.RESUME)
        return await asyncio.gather(*pending)

    *interrupted, third, fourth = subject.run(across_an_update())
    for completion in interrupted:
        assert completion.ending is Ending.ABORTED
        assert 0 < len(completion.token_ids) < 30
        assert set(completion.weights_versions) == {0}
    for completion in (third, fourth):
        assert completion.ending is Ending.LENGTH
        assert completion.weights_versions == (4,) * 30


def joined(parts: list[Completion]) -> Completion:
    return Completion(
        parts[0].request_id,
        token_ids=sum((part.token_ids for part in parts), ()),
        sampler_logprobs=sum((part.sampler_logprobs for part in parts), ()),
        weights_versions=sum((part.weights_versions for part in parts), ()),
        ending=parts[-1].ending,
    )


async def in_pieces(
    subject: Subject,
    served: InferenceEngine,
    asked: list[GenerationRequest],
    interrupt: Callable[[], Awaitable[None]],
    at: int,
) -> list[Completion]:
    """Interrupt all that run after `at` steps and then every four, and resume them, until all have ended by themselves."""
    parts: dict[str, list[Completion]] = {request.request_id: [] for request in asked}
    pending = {asyncio.create_task(served.generate(request)): request for request in asked}
    await subject.settled(at)
    while pending:
        await interrupt()
        await asyncio.sleep(0)
        for task in [task for task in pending if task.done()]:
            request, part = pending.pop(task), task.result()
            parts[request.request_id].append(part)
            if part.ending is Ending.ABORTED:
                rest = replace(request, prefix_ids=request.prefix_ids + part.token_ids)
                pending[asyncio.create_task(served.generate(rest))] = rest
        await subject.settled(4)
    return [joined(parts[request.request_id]) for request in asked]


@pytest.mark.parametrize("num_slots", [3, 64])
@pytest.mark.parametrize("how", ["abort", "adopt"])
def test_a_request_interrupted_anywhere_and_resumed_gives_the_tokens_of_an_uninterrupted_one(subject, how, num_slots):
    asked = requests(12, max_new_tokens=14)

    async def uninterrupted() -> list[Completion]:
        served = subject.engine(num_slots)
        await served.adopt(WeightsUpdate(1, weights()), InFlight.FINISH)
        return await generate_all(served, asked)

    async def interrupted(at: int) -> list[Completion]:
        served, version = subject.engine(num_slots), 1
        await served.adopt(WeightsUpdate(version, weights()), InFlight.FINISH)

        async def interrupt() -> None:
            nonlocal version
            if how == "abort":
                await served.abort(*(request.request_id for request in asked))
            else:
                version += 1
                await served.adopt(WeightsUpdate(version, weights()), InFlight.RESUME)

        return await in_pieces(subject, served, asked, interrupt, at)

    whole = subject.run(uninterrupted())
    for at in range(1, 14):
        for expected, pieces in zip(whole, subject.run(interrupted(at)), strict=True):
            assert pieces.token_ids == expected.token_ids
            assert pieces.sampler_logprobs == pytest.approx(expected.sampler_logprobs, abs=1e-5)
            assert pieces.ending is expected.ending


def test_a_resumed_completion_says_which_version_produced_which_token_and_answers_only_what_is_new(subject):
    request = GenerationRequest("a", (5, 6), 12, 1.0, NO_STOP, seed=1)

    async def across_an_update() -> tuple[Completion, Completion]:
        served = subject.engine()
        pending = asyncio.create_task(served.generate(request))
        await subject.settled(6)
        await served.adopt(WeightsUpdate(4, weights()), InFlight.RESUME)
        first = await pending
        return first, await served.generate(replace(request, prefix_ids=first.token_ids))

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
    asked = requests(20)
    at_once = run_all(engine(), asked)
    monkeypatch.setattr(torch_engine, "PREFILL_TOKENS", 8)
    assert [c.token_ids for c in run_all(engine(), asked)] == [c.token_ids for c in at_once]


def test_an_aborted_request_ends_alone(subject):
    async def abort_one() -> list[Completion]:
        served = subject.engine(2)
        asked = [GenerationRequest(str(i), (5, 6), 10, 1.0, NO_STOP, seed=i) for i in range(3)]
        pending = [asyncio.create_task(served.generate(request)) for request in asked]
        await subject.settled(4)
        await served.abort("0")
        await served.abort("2")
        await served.abort("never heard of")
        return await asyncio.gather(*pending)

    first, second, third = subject.run(abort_one())
    assert [first.ending, second.ending, third.ending] == [Ending.ABORTED, Ending.LENGTH, Ending.ABORTED]
    (alone,) = subject.run_all([GenerationRequest("1", (5, 6), 10, 1.0, NO_STOP, seed=1)])
    assert second.token_ids == alone.token_ids


def test_sleep_with_a_request_in_flight_is_refused(subject):
    async def fall_asleep() -> list[Completion]:
        served = subject.engine(1)
        pending = [asyncio.create_task(served.generate(request)) for request in requests(3, stop=NO_STOP)]
        await subject.settled(3)
        with pytest.raises(AssertionError, match="must not sleep with 3 requests in flight"):
            await served.sleep()
        completions = await asyncio.gather(*pending)
        await served.sleep()
        await served.wake()
        return completions

    assert [len(completion.token_ids) for completion in subject.run(fall_asleep())] == [12, 12, 12]


def test_whoever_asked_and_went_away_makes_room(subject):
    async def go_away() -> Completion:
        served = subject.engine(1)
        gone = asyncio.create_task(served.generate(GenerationRequest("gone", (5, 6), 40, 1.0, NO_STOP, seed=1)))
        await subject.settled(3)
        gone.cancel()
        completion = await served.generate(GenerationRequest("next", (5, 6), 3, 1.0, NO_STOP, seed=2))
        await served.sleep()
        return completion

    assert len(subject.run(go_away()).token_ids) == 3


def test_new_weights_change_what_is_generated_and_sleep_changes_nothing():
    async def three_times() -> list[tuple[int, ...]]:
        served, asked = engine(), requests(4, stop=NO_STOP)
        await served.adopt(WeightsUpdate(1, trainer(seed=1).weights()), InFlight.FINISH)
        before = await generate_all(served, asked)
        await served.sleep()
        await served.wake()
        after_sleep = await generate_all(served, asked)
        await served.adopt(WeightsUpdate(2, trainer(seed=2).weights()), InFlight.FINISH)
        return [tuple(c.token_ids for c in batch) for batch in (before, after_sleep, await generate_all(served, asked))]

    before, after_sleep, other_weights = asyncio.run(three_times())
    assert before == after_sleep
    assert before != other_weights


def test_incomplete_weights_are_refused():
    some = list(trainer().weights())[:-1]
    with pytest.raises(AssertionError, match="lacks"):
        asyncio.run(engine().adopt(WeightsUpdate(1, iter(some)), InFlight.FINISH))


def test_a_request_that_cannot_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="request r0 may reach 50 tokens, but model.max_positions is 48"):
        run_all(engine(), [GenerationRequest("r0", (5, 6), 48, 1.0, NO_STOP, seed=1)])


def test_a_step_that_fails_fails_every_request_it_held():
    served = engine(2)
    served._model.get_output_embeddings().forward = lambda _: 1 / 0

    async def all_failures() -> list[BaseException]:
        pending = [asyncio.create_task(served.generate(request)) for request in requests(5)]
        done, _ = await asyncio.wait(pending, timeout=10)
        return [task.exception() for task in done]

    assert [type(error) for error in asyncio.run(all_failures())] == [ZeroDivisionError] * 5
