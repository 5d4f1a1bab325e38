"""Rehearsal engine: its timing, to the token. tests/contracts/test_inference_engine.py has the rest of its behaviour."""

import asyncio
from itertools import pairwise
from statistics import median

import pytest

from roll_core.config.inference import EnvironmentLatency, RehearsalInference
from roll_core.config.rollout import InFlightPolicy
from roll_core.inference.base import WeightsUpdate, adopt
from roll_core.inference.rehearsal_engine import NUM_TOKENS, RehearsalEngine, plan_generation
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.roles.engine_role import EngineRole
from roll_core.simulation.virtual_time import run_in_virtual_time
from roll_core.types.trajectory import Ending
from tests.support import tiny_config

STOP = (1,)


def rehearsal_config(**changes) -> RehearsalInference:
    settings = {"seconds_per_token": 0.1, "median_tokens": 5, "sigma": 0.0}
    return RehearsalInference(**{**settings, **changes})


def request(number: int = 0, max_new_tokens: int = 10, stop=STOP, prefix=()) -> GenerationRequest:
    return GenerationRequest(f"r{number}", (5, 6), max_new_tokens, 1.0, stop, seed=number, prefix_ids=prefix)


def finish_times(engine: RehearsalEngine, requests: list[GenerationRequest]) -> list[float]:
    """Run all requests concurrently; return the virtual time at which each finished, in seconds."""

    async def run_all() -> list[float]:
        loop = asyncio.get_running_loop()

        async def finish_time(request: GenerationRequest) -> float:
            await engine.generate(request)
            return loop.time()

        return await asyncio.gather(*(finish_time(request) for request in requests))

    return run_in_virtual_time(run_all())


def test_a_completion_takes_its_prefill_and_its_tokens():
    engine = RehearsalEngine(rehearsal_config(seconds_to_first_token=2.0), num_slots=1)
    assert finish_times(engine, [request()]) == pytest.approx([2.5])


def test_time_per_token_does_not_grow_with_the_number_of_sequences_and_requests_without_a_slot_wait_in_order():
    engine = RehearsalEngine(rehearsal_config(), num_slots=100)
    assert finish_times(engine, [request(i) for i in range(250)]) == pytest.approx([0.5] * 100 + [1.0] * 100 + [1.5] * 50)


def test_lengths_are_lognormal_and_end_at_the_longest_completion_allowed():
    drawn = [plan_generation(rehearsal_config(median_tokens=100, sigma=1.07), request(i, 100_000)) for i in range(2500)]
    lengths = [len(plan.arrivals_T) for plan in drawn]
    longest = [max(lengths[start : start + 250]) for start in range(0, 2500, 250)]
    assert median(lengths) == pytest.approx(100, rel=0.1)
    assert sum(longest) / 10 == pytest.approx(2000, rel=0.2)
    clipped = [plan_generation(rehearsal_config(median_tokens=100, sigma=1.07), request(i, 150)) for i in range(2500)]
    for length, plan in zip(lengths, clipped, strict=True):
        assert len(plan.arrivals_T) == min(length, 150)
        assert plan.ending is (Ending.STOP if length <= 150 else Ending.LENGTH)


def test_a_greedy_request_takes_as_long_as_a_sampled_one_of_the_same_seed():
    sampled, greedy = request(3), GenerationRequest("g", (9,), 10, 0.0, STOP, seed=3)
    timing = rehearsal_config(sigma=1.0)
    assert plan_generation(timing, sampled).arrivals_T.tolist() == plan_generation(timing, greedy).arrivals_T.tolist()


def test_an_agent_waits_for_its_environment_at_even_distances_and_keeps_its_slot():
    """Six tokens, with waits of ten seconds after the second and fourth. The next attempt begins after the last token."""
    environment = EnvironmentLatency(median_seconds=10.0, sigma=0.0, turns=2)
    timing = rehearsal_config(seconds_per_token=1.0, median_tokens=6, environment=environment)
    assert plan_generation(timing, request()).arrivals_T.tolist() == [1, 2, 13, 14, 25, 26]
    assert finish_times(RehearsalEngine(timing, num_slots=1), [request(0), request(1)]) == [26, 52]


def test_a_resumed_attempt_has_the_remaining_waits_and_repeats_one_that_was_interrupted():
    environment = EnvironmentLatency(median_seconds=10.0, sigma=0.0, turns=2)
    timing = rehearsal_config(seconds_per_token=1.0, seconds_to_first_token=0.5, median_tokens=6, environment=environment)
    assert plan_generation(timing, request(prefix=(7, 8))).arrivals_T.tolist() == [11.5, 12.5, 23.5, 24.5]
    assert plan_generation(timing, request(prefix=(7, 8, 9))).arrivals_T.tolist() == [1.5, 12.5, 13.5]


def test_waits_are_lognormal_and_differ_between_turns_and_attempts():
    environment = EnvironmentLatency(median_seconds=10.0, sigma=1.0, turns=4)
    timing = rehearsal_config(seconds_per_token=1e-6, environment=environment)
    waits = []
    for number in range(500):
        arrivals = plan_generation(timing, request(number)).arrivals_T.tolist()
        waits += [later - earlier for earlier, later in pairwise(arrivals)]
    assert median(waits) == pytest.approx(10.0, rel=0.1)
    assert len({round(wait, 3) for wait in waits}) > 1900


def test_versions_follow_the_times_of_adoptions():
    """Ten tokens, one every tenth of a second; new weights after 0.25 and 0.65 seconds."""

    async def adopt_twice() -> Completion:
        engine = RehearsalEngine(rehearsal_config(), num_slots=1)
        pending = asyncio.create_task(engine.generate(request(stop=())))
        for version in (1, 2):
            await asyncio.sleep(0.25 if version == 1 else 0.4)
            await adopt(engine, WeightsUpdate(version, iter(())), InFlightPolicy.CONTINUE)
        return await pending

    assert run_in_virtual_time(adopt_twice()).weights_versions == (0,) * 2 + (1,) * 4 + (2,) * 4


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.25, 0.3, 0.499])
def test_an_abort_returns_the_tokens_generated_so_far(seconds):
    async def abort() -> Completion:
        engine = RehearsalEngine(rehearsal_config(), num_slots=1)
        pending = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        await asyncio.sleep(seconds)
        await engine.abort("r0")
        return await pending

    completion = run_in_virtual_time(abort())
    assert completion.ending is Ending.ABORTED
    assert len(completion.token_ids) == int(10 * seconds + 1e-6)


def test_an_attempt_that_has_all_its_tokens_when_interrupted_has_ended_by_itself():
    """Timers fire late in a busy event loop. The attempt must not be resumed after its stop token."""

    async def interrupt_late() -> Completion:
        engine = RehearsalEngine(rehearsal_config(), num_slots=1)
        pending = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        asyncio.get_running_loop()._clock.now += 1.0
        await adopt(engine, WeightsUpdate(1, iter(())), InFlightPolicy.RESUME)
        return await pending

    completion = run_in_virtual_time(interrupt_late())
    assert completion.ending is Ending.STOP
    assert completion.token_ids[-1] == 1
    assert len(completion.token_ids) == 5


def test_tokens_are_of_the_smallest_vocabulary_and_have_the_logprob_of_a_uniform_choice():
    async def generate() -> Completion:
        return await RehearsalEngine(rehearsal_config(), num_slots=1).generate(request(4, 2000, stop=()))

    completion = run_in_virtual_time(generate())
    assert set(completion.token_ids) == set(range(NUM_TOKENS))
    assert completion.sampler_logprobs == pytest.approx((-4.4427,) * 2000, abs=1e-4)  # -log 85


def test_a_thousand_slots_cost_one_timer_each():
    async def wake_ups() -> int:
        engine, loop = RehearsalEngine(rehearsal_config(median_tokens=1000), num_slots=1000), asyncio.get_running_loop()
        loop_turns, select = [], loop._clock.select

        def counted(timeout: float | None):
            loop_turns.append(timeout)
            return select(timeout)

        loop._clock.select = counted
        await asyncio.gather(*(engine.generate(request(i, 2000)) for i in range(1000)))
        return len(loop_turns)

    assert run_in_virtual_time(wake_ups()) < 20


def test_the_engine_role_rehearses_where_the_config_says_so(tmp_path):
    async def generate() -> list[float]:
        role = EngineRole(tiny_config(tmp_path, inference=rehearsal_config().model_dump()), f"file://{tmp_path}")
        await role.start()
        return [asyncio.get_running_loop().time() async for _ in role.generate([request(0), request(1)])]

    assert run_in_virtual_time(generate()) == pytest.approx([0.5])
