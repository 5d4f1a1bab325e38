"""Simulator: modelled engines against times worked by hand, whole iterations, and machine models that a fit recovers from
simulated traces."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from roll_core.config.rollout import InFlightPolicy
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.reporting.activity import iterations_of, stage_spans, summarise
from roll_core.simulation.fitting import fit_models, non_negative_least_squares, with_slot_times
from roll_core.simulation.machines import Cost, DemandBook, EngineModel, GraderModel, SimulatedEngine, TrainerModel
from roll_core.simulation.simulator import MachineModels, Prediction, recommend, simulate
from roll_core.simulation.virtual_time import run_in_virtual_time
from roll_core.simulation.workload import Demand, SampledWorkload, recorded_workload
from roll_core.types.trace import AttemptTrace, Fate, Span
from roll_core.types.trajectory import Ending
from tests.support import tiny_config


class LengthsByProblem:
    """Workload in which attempts at problem n have n tokens, and groups of odd problems are not useful."""

    def demand(self, problem: int, number: int) -> Demand:
        return Demand(problem)

    def is_useful(self, problem: int) -> bool:
        return problem % 2 == 0


def request(name: str, num_tokens: int, prefix: int = 0) -> GenerationRequest:
    return GenerationRequest(name, (num_tokens,), 1000, 1.0, (1,), 0, prefix_ids=(0,) * prefix)


def run_engine(
    model: EngineModel,
    num_slots: int,
    *requests: GenerationRequest,
    meanwhile: Callable[[SimulatedEngine], Awaitable[None]] | None = None,
) -> dict[str, tuple[float, Completion]]:
    """Run requests on a simulated engine; return the virtual time and the completion of each, by request id."""

    async def run() -> dict[str, tuple[float, Completion]]:
        engine = SimulatedEngine("engine 0", model, num_slots, DemandBook(LengthsByProblem()))
        finished: dict[str, tuple[float, Completion]] = {}

        async def collect() -> None:
            async for completions in engine.generate(list(requests)):
                for completion in completions:
                    now = asyncio.get_running_loop().time()
                    finished[completion.request_id] = (pytest.approx(now, abs=1e-6), completion)

        await asyncio.gather(collect(), *([meanwhile(engine)] if meanwhile else []))
        return finished

    return run_in_virtual_time(run())


# -------------------------------------------------------------------------------------------------- engines
def test_a_sequence_alone_takes_the_time_to_first_token_and_the_time_of_its_tokens():
    finished = run_engine(EngineModel(0.5, 0.1, 7.0), 4, request("a", 10))
    assert finished["a"][0] == 0.5 + 10 * 0.1
    assert len(finished["a"][1].token_ids) == 10
    assert finished["a"][1].ending is Ending.STOP


def test_sequences_slow_each_other_down_while_they_run_together():
    """Both sequences take 0.2 s per token until `a` has its 10 tokens. Then `b` has 10 tokens left, at 0.1 s each."""
    finished = run_engine(EngineModel(0.0, 0.1, 0.1), 4, request("a", 10), request("b", 20))
    assert (finished["a"][0], finished["b"][0]) == (2.0, 3.0)


def test_a_sequence_without_a_slot_waits_for_one():
    finished = run_engine(EngineModel(0.0, 0.1), 1, request("a", 10), request("b", 5))
    assert (finished["a"][0], finished["b"][0]) == (1.0, 1.5)


def test_a_resumed_sequence_generates_only_its_missing_tokens():
    finished = run_engine(EngineModel(0.0, 0.1), 1, request("a", 10, prefix=7))
    assert finished["a"][0] == pytest.approx(0.3)
    assert len(finished["a"][1].token_ids) == 3


def test_an_aborted_sequence_returns_the_tokens_it_has():
    async def abort(engine: SimulatedEngine) -> None:
        await asyncio.sleep(0.55)
        await engine.abort(["a", "c", "unknown"])

    finished = run_engine(EngineModel(0.0, 0.1), 2, request("a", 10), request("b", 10), request("c", 10), meanwhile=abort)
    assert (finished["a"][0], len(finished["a"][1].token_ids), finished["a"][1].ending) == (0.55, 5, Ending.ABORTED)
    assert (finished["c"][0], len(finished["c"][1].token_ids)) == (0.55, 0)
    assert finished["b"][0] == 1.0


@pytest.mark.parametrize(
    ("in_flight", "a", "versions", "b"),
    [
        (InFlightPolicy.CONTINUE, 3.0, (0,) * 5 + (1,) * 5, 3.5),
        (InFlightPolicy.FINISH, 1.0, (0,) * 10, 1.0 + 2.0 + 0.5),
        (InFlightPolicy.RESUME, 0.55, (0,) * 5, 2.55 + 0.5),
    ],
)
def test_sequences_in_flight_follow_the_policy_when_weights_change(in_flight, a, versions, b):
    """Adoption takes two seconds from 0.55 s on, while `a` runs and `b` waits for its slot."""

    async def adopt(engine: SimulatedEngine) -> None:
        await asyncio.sleep(0.55)
        await engine.adopt(1, in_flight, 2.0)

    finished = run_engine(EngineModel(0.0, 0.1), 1, request("a", 10), request("b", 5), meanwhile=adopt)
    assert (finished["a"][0], finished["a"][1].weights_versions) == (a, versions)
    assert (finished["b"][0], finished["b"][1].weights_versions) == (b, (1,) * 5)


# -------------------------------------------------------------------------------------------------- iterations
def machine_models(**changes: object) -> MachineModels:
    parts = {
        "engine": EngineModel(0.0, 0.1),
        "grader": GraderModel((0.5,)),
        "trainer": TrainerModel(2, Cost(1.0), Cost(1.0, 0.025), publish_seconds=0.5, other_seconds=0.25),
    }
    return MachineModels(**parts | changes)


ROLLOUT = {"num_groups": 2, "group_size": 2, "max_new_tokens": 20, "slots_per_engine": 4}


def test_an_iteration_takes_the_sum_of_its_stages(tmp_path):
    """Collect takes 10 tokens of 0.1 s, then four grades of 0.5 s by one grader. Training takes 2 x (1 + 1 + 40 x 0.025) s:
    the model was measured on two devices and runs on one. Publishing and the rest take 0.75 s."""
    config = tiny_config(tmp_path, rollout=ROLLOUT)
    prediction = simulate(config, machine_models(), SampledWorkload(10, 0.0, 20), num_iterations=3)
    assert prediction.iteration_seconds == pytest.approx([1.0 + 2.0 + 6.0 + 0.75] * 3)
    assert prediction.trainer_busy == pytest.approx(6.0 / 9.75, abs=1e-5)
    assert prediction.engines_busy == pytest.approx(1.0 / 9.75)
    assert prediction.mean_running == pytest.approx(4.0 / 9.75)
    assert (prediction.staleness_mean, prediction.staleness_max, prediction.wasted_share) == (0.0, 0, 0.0)
    assert len(prediction.traces) == 12
    assert {trace.problem for trace in prediction.traces} == set(range(6))


def test_generation_ahead_of_training_costs_no_time(tmp_path):
    """A batch takes 1 s and training 2 s: one after the other, or both at once with weights that are one version older."""
    apart = {"cluster": {"devices_per_node": 2}, "placement": {"trainer": [0], "engines": [1]}}
    machines = machine_models(grader=GraderModel((0.0,)), trainer=TrainerModel(1, Cost(0.0), Cost(2.0)))
    workload = SampledWorkload(10, 0.0, 20)
    synchronous = simulate(tiny_config(tmp_path, rollout=ROLLOUT, **apart), machines, workload, num_iterations=4)
    assert synchronous.iteration_seconds == pytest.approx([3.0] * 4)
    ahead = tiny_config(tmp_path, rollout=ROLLOUT | {"async_ratio": 1}, iterations=9, **apart)
    prediction = simulate(ahead, machines, workload, num_iterations=4)
    assert prediction.iteration_seconds == pytest.approx([3.0, 2.0, 2.0, 2.0])
    assert prediction.seconds_per_iteration == pytest.approx(2.0)
    assert prediction.trainer_busy == pytest.approx(8 / 9, abs=1e-5)
    assert (prediction.staleness_mean, prediction.staleness_max) == (0.75, 1)
    activity = summarise(stage_spans(prediction.stages), prediction.traces)
    assert (activity.staleness.p50, activity.trainer_busy) == (1.0, pytest.approx(8 / 9, abs=1e-5))


def test_groups_that_a_filter_rejects_are_generated_and_wasted(tmp_path):
    class TenTokensEach(LengthsByProblem):
        def demand(self, problem: int, number: int) -> Demand:
            return Demand(10)

    config = tiny_config(tmp_path, rollout=ROLLOUT | {"filter": {"equal_rewards": True}})
    prediction = simulate(config, machine_models(), TenTokensEach(), num_iterations=1)
    fates = {trace.problem: trace.fate for trace in prediction.traces}
    assert fates == {0: Fate.TRAINED, 1: Fate.FILTERED, 2: Fate.TRAINED}
    assert prediction.wasted_share == pytest.approx(1 / 3)


def test_redundancy_shortens_the_wait_for_the_slowest_group(tmp_path):
    workload = SampledWorkload(20, 1.0, 200)
    rollout = {"num_groups": 16, "group_size": 4, "max_new_tokens": 200, "slots_per_engine": 128}
    config = tiny_config(tmp_path, rollout=rollout, model={"kind": "scratch", "max_positions": 256})
    machines = machine_models(grader=GraderModel((0.0,)), trainer=TrainerModel(1, Cost(1.0), Cost(1.0)))
    rows = recommend(config, machines, workload, num_iterations=3)
    seconds = [row.prediction.seconds_per_iteration for row in rows]
    assert seconds == sorted(seconds)
    waiting = {row.overrides[-1]: row.prediction for row in rows if "rollout.async_ratio=0" in row.overrides}
    none, some = waiting["rollout.redundant_groups=0"], waiting["rollout.redundant_groups=4"]
    assert some.seconds_per_iteration < none.seconds_per_iteration
    assert some.wasted_share > none.wasted_share == 0.0


def test_the_grid_splits_the_devices_where_trainer_and_engines_are_apart(tmp_path):
    placement = {"trainer": [0], "engines": [1, 2, 3]}
    config = tiny_config(tmp_path, cluster={"devices_per_node": 4}, placement=placement, rollout=ROLLOUT)
    rows = recommend(config, machine_models(), SampledWorkload(10, 0.0, 20), num_iterations=1)
    splits = {row.overrides[:2] for row in rows}
    assert splits == {
        ("placement.trainer=[0]", "placement.engines=1-3"),
        ("placement.trainer=0-1", "placement.engines=2-3"),
        ("placement.trainer=0-2", "placement.engines=[3]"),
    }
    assert rows[0].overrides[0] == "placement.trainer=0-2", "training is most of the time here"


def test_the_grid_keeps_the_devices_of_an_engine_together(tmp_path):
    config = tiny_config(
        tmp_path,
        cluster={"devices_per_node": 4},
        placement={"trainer": [0, 1], "engines": [2, 3]},
        inference={"kind": "vllm", "tensor_parallel": 2},
        rollout=ROLLOUT,
    )
    rows = recommend(config, machine_models(), SampledWorkload(10, 0.0, 20), num_iterations=1)
    assert {row.overrides[:2] for row in rows} == {("placement.trainer=0-1", "placement.engines=2-3")}


# -------------------------------------------------------------------------------------------------- fitting
def timings_of(prediction: Prediction) -> list[dict[str, float]]:
    """Timings of a simulated run as its manifests would hold them, one dict per iteration."""
    spans = stage_spans(prediction.stages)
    return [
        {span.stage: span.end - span.begin for span in spans if span.iteration == number and span.stage != "commit"}
        | {"wall": end - begin}
        for number, (begin, end) in iterations_of(spans).items()
    ]


def traces_of(prediction: Prediction) -> list[list[AttemptTrace]]:
    """Traces of a simulated run, by iteration."""
    by_iteration: dict[float, list[AttemptTrace]] = {}
    for trace in prediction.traces:
        by_iteration.setdefault(trace.consumed_at, []).append(trace)
    return list(by_iteration.values())


@pytest.mark.parametrize(("slots", "async_ratio"), [(16, 0), (64, 0), (64, 1)])
def test_a_fit_recovers_the_models_from_their_simulated_traces(tmp_path, slots, async_ratio):
    """Fewer slots than attempts must not bias the fit: an attempt that waits for a slot or for new weights is not slow."""
    chance = random.Random(3)
    true = MachineModels(
        EngineModel(0.2, 0.01, 0.0002),
        GraderModel(tuple(chance.uniform(0.05, 0.2) for _ in range(500))),
        TrainerModel(1, Cost(1.0, 1e-5), Cost(2.0, 1e-4), 1.0, 2.0, 0.5, 0.3),
    )
    rollout = {"num_groups": 16, "group_size": 8, "max_new_tokens": 2000, "slots_per_engine": slots, "redundant_groups": 2}
    rollout["async_ratio"] = async_ratio
    config = tiny_config(
        tmp_path,
        cluster={"devices_per_node": 3},
        placement={"trainer": [0], "engines": [1, 2], "reward_workers": 2},
        rollout=rollout,
        model={"kind": "scratch", "max_positions": 4096},
        training={"micro_batch_tokens": 4096},
    )
    recorded = simulate(config, true, SampledWorkload(200, 0.8, 2000), num_iterations=4)
    found = fit_models(config, traces_of(recorded), timings_of(recorded))
    assert found.engine.seconds_to_first_token == pytest.approx(0.2, rel=0.1)
    assert found.engine.seconds_per_token == pytest.approx(0.01, rel=0.03)
    assert found.engine.seconds_per_token_per_running == pytest.approx(0.0002, rel=0.03)
    assert sum(found.grader.seconds) / len(found.grader.seconds) == pytest.approx(0.125, rel=0.1)
    assert found.trainer.prepare.seconds == pytest.approx(1.0, rel=0.01)
    assert found.trainer.update.seconds_per_token == pytest.approx(1e-4, rel=0.01)
    assert found.trainer.other_seconds == pytest.approx(0.3, rel=0.01)
    again = simulate(config, found, recorded_workload(recorded.traces), num_iterations=4)
    assert again.seconds_per_iteration == pytest.approx(recorded.seconds_per_iteration, rel=0.1)


def test_a_span_begins_when_its_attempt_got_a_slot():
    spans = [Span("e", 0.0, 4.0, 4), Span("e", 0.0, 2.0, 2), Span("e", 0.0, 5.0, 3), Span("e", 0.0, 1.0, 0)]
    assert [(span.begin, span.end) for span in with_slot_times(spans, 2)] == [(0.0, 4.0), (0.0, 2.0), (2.0, 5.0)]


def test_least_squares_without_negative_weights():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative_least_squares(columns, np.array([3.0, 5.0, 7.0])).tolist() == pytest.approx([1.0, 2.0])
    assert non_negative_least_squares(columns, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])


def test_a_recorded_workload_keeps_groups_together_and_knows_which_were_useful():
    def trace(problem: int, fate: Fate, num_tokens: int) -> AttemptTrace:
        return AttemptTrace(problem, 0, fate, 1, 0, 0.0, (Span("e", 0.0, 1.0, num_tokens),), None, None, 2.0)

    workload = recorded_workload(
        [trace(0, Fate.TRAINED, 5), trace(0, Fate.TRAINED, 6), trace(1, Fate.FILTERED, 50), trace(1, Fate.ABORTED, 6)]
    )
    for problem in range(20):
        lengths = {workload.demand(problem, number).num_tokens for number in range(3)}
        assert lengths == ({5, 6} if workload.is_useful(problem) else {50})
    assert len({workload.is_useful(problem) for problem in range(20)}) == 2
