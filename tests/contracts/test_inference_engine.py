"""What every inference engine must do: tokens that depend on seed and weights alone, honest logprobs, honest versions."""

import asyncio
import random

import pytest
import torch

from roll_core.batching.demonstrations import as_sample
from roll_core.batching.packing import PackingLimits
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.rollout import InFlight
from roll_core.config.training import Packing, TrainingConfig
from roll_core.inference.base import WeightsUpdate
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.torch_engine import TorchEngine
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


async def generate_all(served: TorchEngine, asked: list[GenerationRequest]) -> list[Completion]:
    return await asyncio.gather(*(served.generate(request) for request in asked))


def run_all(served: TorchEngine, asked: list[GenerationRequest]) -> list[Completion]:
    return asyncio.run(generate_all(served, asked))


async def settled(steps: int) -> None:
    """Let the engine take some steps: it yields to the event loop after each."""
    for _ in range(steps):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_slots", [1, 3, 64])
def test_tokens_do_not_depend_on_how_many_sequences_share_the_engine(num_slots):
    asked = requests(20)
    alone = run_all(engine(1), asked)
    together = run_all(engine(num_slots), asked)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_a_seed_gives_its_tokens_again_and_another_seed_others():
    asked = requests(8, stop=NO_STOP)
    first, again = run_all(engine(), asked), run_all(engine(), asked)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.token_ids for c in first}) == 8


def test_generation_ends_at_a_stop_token_or_at_its_length():
    for request, completion in zip(asked := requests(40), run_all(engine(), asked), strict=True):
        stopped = completion.token_ids[-1] in request.stop_token_ids
        assert not set(completion.token_ids[:-1]) & set(request.stop_token_ids)
        assert completion.ending is (Ending.STOP if stopped else Ending.LENGTH)
        assert stopped or len(completion.token_ids) == request.max_new_tokens


def test_a_finished_sequence_makes_room_at_once():
    """With two slots, one long request and many short ones: the short ones all finish while the long one still runs."""

    async def finish_order() -> list[str]:
        served, order = engine(2), []
        long = GenerationRequest("long", (5, 6), 40, 1.0, NO_STOP, seed=1)
        short = [GenerationRequest(f"short {i}", (5, 6), 3, 1.0, NO_STOP, seed=i) for i in range(8)]

        async def one(request: GenerationRequest) -> None:
            await served.generate(request)
            order.append(request.request_id)

        await asyncio.gather(*(one(request) for request in [long, *short]))
        return order

    assert asyncio.run(finish_order())[-1] == "long"


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


def test_every_token_carries_the_version_that_produced_it_when_generation_continues():
    async def across_an_update() -> Completion:
        served = engine()
        pending = asyncio.create_task(served.generate(GenerationRequest("a", (5, 6), 12, 1.0, NO_STOP, seed=1)))
        await settled(5)
        await served.adopt(WeightsUpdate(4, trainer().weights()), InFlight.CONTINUE)
        return await pending

    versions = asyncio.run(across_an_update()).weights_versions
    assert set(versions) == {0, 4}
    assert list(versions) == sorted(versions)
    assert len(versions) == 12


def test_finish_lets_running_requests_end_with_the_weights_they_began_with():
    async def across_an_update() -> list[Completion]:
        served = engine(2)
        asked = [GenerationRequest(str(i), (5, 6), 6, 1.0, NO_STOP, seed=i) for i in range(4)]
        pending = [asyncio.create_task(served.generate(request)) for request in asked]
        await settled(3)
        await served.adopt(WeightsUpdate(4, trainer().weights()), InFlight.FINISH)
        return await asyncio.gather(*pending)

    completions = asyncio.run(across_an_update())
    assert [set(c.weights_versions) for c in completions] == [{0}, {0}, {4}, {4}]


def test_abort_on_adoption_returns_what_was_generated():
    async def across_an_update() -> Completion:
        served = engine()
        pending = asyncio.create_task(served.generate(GenerationRequest("a", (5, 6), 30, 1.0, NO_STOP, seed=1)))
        await settled(5)
        await served.adopt(WeightsUpdate(4, trainer().weights()), InFlight.RESUME)
        return await pending

    completion = asyncio.run(across_an_update())
    assert completion.ending is Ending.ABORTED
    assert 0 < len(completion.token_ids) < 30


def test_an_aborted_request_ends_alone():
    async def abort_one() -> list[Completion]:
        served = engine(2)
        asked = [GenerationRequest(str(i), (5, 6), 10, 1.0, NO_STOP, seed=i) for i in range(3)]
        pending = [asyncio.create_task(served.generate(request)) for request in asked]
        await settled(4)
        await served.abort("0")
        await served.abort("2")
        await served.abort("never heard of")
        return await asyncio.gather(*pending)

    first, second, third = asyncio.run(abort_one())
    assert [first.ending, second.ending, third.ending] == [Ending.ABORTED, Ending.LENGTH, Ending.ABORTED]
    assert second.token_ids == run_all(engine(), [GenerationRequest("1", (5, 6), 10, 1.0, NO_STOP, seed=1)])[0].token_ids


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
