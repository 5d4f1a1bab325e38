"""Modelled engines by hand-worked times, simulated iterations, and models that are found again in what they recorded."""

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


class Lengths:
    """The problem's number is the length of its attempts; odd ones are useless."""

    def demand(self, problem: int, number: int) -> Demand:
        return Demand(problem)

    def is_useful(self, problem: int) -> bool:
        return problem % 2 == 0


def asked(name: str, num_tokens: int, prefix: int = 0) -> GenerationRequest:
    return GenerationRequest(name, (num_tokens,), 1000, 1.0, (1,), 0, prefix_ids=(0,) * prefix)


def generated(
    model: EngineModel,
    num_slots: int,
    *requests: GenerationRequest,
    meanwhile: Callable[[SimulatedEngine], Awaitable[None]] | None = None,
) -> dict[str, tuple[float, Completion]]:
    """When each request came back, and with what."""

    async def run() -> dict[str, tuple[float, Completion]]:
        engine = SimulatedEngine("engine 0", model, num_slots, DemandBook(Lengths()))
        back: dict[str, tuple[float, Completion]] = {}

        async def take() -> None:
            async for completions in engine.generate(list(requests)):
                for completion in completions:
                    now = asyncio.get_running_loop().time()
                    back[completion.request_id] = (pytest.approx(now, abs=1e-6), completion)

        await asyncio.gather(take(), *([meanwhile(engine)] if meanwhile else []))
        return back

    return run_in_virtual_time(run())


# -------------------------------------------------------------------------------------------------- engines
def test_a_sequence_alone_takes_its_first_token_and_the_others():
    back = generated(EngineModel(0.5, 0.1, 7.0), 4, asked("a", 10))
    assert back["a"][0] == 0.5 + 10 * 0.1
    assert len(back["a"][1].token_ids) == 10
    assert back["a"][1].ending is Ending.STOP


def test_sequences_slow_each_other_down_while_they_run_together():
    """Both take 0.2 s a token until the first has its 10; then the other has 10 left at 0.1 s."""
    back = generated(EngineModel(0.0, 0.1, 0.1), 4, asked("a", 10), asked("b", 20))
    assert (back["a"][0], back["b"][0]) == (2.0, 3.0)


def test_who_has_no_slot_waits_for_one():
    back = generated(EngineModel(0.0, 0.1), 1, asked("a", 10), asked("b", 5))
    assert (back["a"][0], back["b"][0]) == (1.0, 1.5)


def test_a_resumed_sequence_generates_what_it_lacks():
    back = generated(EngineModel(0.0, 0.1), 1, asked("a", 10, prefix=7))
    assert back["a"][0] == pytest.approx(0.3)
    assert len(back["a"][1].token_ids) == 3


def test_an_aborted_sequence_comes_back_with_what_it_has():
    async def abort(engine: SimulatedEngine) -> None:
        await asyncio.sleep(0.55)
        await engine.abort(["a", "c", "unknown"])

    back = generated(EngineModel(0.0, 0.1), 2, asked("a", 10), asked("b", 10), asked("c", 10), meanwhile=abort)
    assert (back["a"][0], len(back["a"][1].token_ids), back["a"][1].ending) == (0.55, 5, Ending.ABORTED)
    assert (back["c"][0], len(back["c"][1].token_ids)) == (0.55, 0)
    assert back["b"][0] == 1.0


@pytest.mark.parametrize(
    ("in_flight", "a", "versions", "b"),
    [
        (InFlightPolicy.CONTINUE, 3.0, (0,) * 5 + (1,) * 5, 3.5),
        (InFlightPolicy.FINISH, 1.0, (0,) * 10, 1.0 + 2.0 + 0.5),
        (InFlightPolicy.RESUME, 0.55, (0,) * 5, 2.55 + 0.5),
    ],
)
def test_weights_change_as_the_config_says(in_flight, a, versions, b):
    """Two seconds of adopting from 0.55 s on, while `a` runs and `b` waits for its slot."""

    async def adopt(engine: SimulatedEngine) -> None:
        await asyncio.sleep(0.55)
        await engine.adopt(1, in_flight, 2.0)

    back = generated(EngineModel(0.0, 0.1), 1, asked("a", 10), asked("b", 5), meanwhile=adopt)
    assert (back["a"][0], back["a"][1].weights_versions) == (a, versions)
    assert (back["b"][0], back["b"][1].weights_versions) == (b, (1,) * 5)


# -------------------------------------------------------------------------------------------------- iterations
def models(**changes: object) -> MachineModels:
    parts = {
        "engine": EngineModel(0.0, 0.1),
        "grader": GraderModel((0.5,)),
        "trainer": TrainerModel(2, Cost(1.0), Cost(1.0, 0.025), publish_seconds=0.5, other_seconds=0.25),
    }
    return MachineModels(**parts | changes)


ROLLOUT = {"num_groups": 2, "group_size": 2, "max_new_tokens": 20, "slots_per_engine": 4}


def test_an_iteration_takes_what_its_parts_take(tmp_path):
    """Collect: 10 tokens of 0.1 s, then four grades of 0.5 s by one grader. Then 2 x (1 + 1 + 40 x 0.025) s of training, by
    one device instead of two, and 0.75 s more."""
    config = tiny_config(tmp_path, rollout=ROLLOUT)
    prediction = simulate(config, models(), SampledWorkload(10, 0.0, 20), num_iterations=3)
    assert prediction.iteration_seconds == pytest.approx([1.0 + 2.0 + 6.0 + 0.75] * 3)
    assert prediction.trainer_busy == pytest.approx(6.0 / 9.75, abs=1e-5)
    assert prediction.engines_busy == pytest.approx(1.0 / 9.75)
    assert prediction.mean_running == pytest.approx(4.0 / 9.75)
    assert (prediction.staleness_mean, prediction.staleness_max, prediction.wasted_share) == (0.0, 0, 0.0)
    assert len(prediction.traces) == 12
    assert {trace.problem for trace in prediction.traces} == set(range(6))


def test_what_is_generated_ahead_costs_no_time(tmp_path):
    """A batch takes 1 s, training 2 s: one after the other, or both at once, by weights that are one version older."""
    apart = {"cluster": {"devices_per_node": 2}, "placement": {"trainer": [0], "engines": [1]}}
    machines = models(grader=GraderModel((0.0,)), trainer=TrainerModel(1, Cost(0.0), Cost(2.0)))
    workload = SampledWorkload(10, 0.0, 20)
    waits = simulate(tiny_config(tmp_path, rollout=ROLLOUT, **apart), machines, workload, num_iterations=4)
    assert waits.iteration_seconds == pytest.approx([3.0] * 4)
    ahead = tiny_config(tmp_path, rollout=ROLLOUT | {"async_ratio": 1}, iterations=9, **apart)
    prediction = simulate(ahead, machines, workload, num_iterations=4)
    assert prediction.iteration_seconds == pytest.approx([3.0, 2.0, 2.0, 2.0])
    assert prediction.seconds_per_iteration == pytest.approx(2.0)
    assert prediction.trainer_busy == pytest.approx(8 / 9, abs=1e-5)
    assert (prediction.staleness_mean, prediction.staleness_max) == (0.75, 1)
    activity = summarise(stage_spans(prediction.stages), prediction.traces)
    assert (activity.staleness.p50, activity.trainer_busy) == (1.0, pytest.approx(8 / 9, abs=1e-5))


def test_what_a_filter_leaves_out_is_generated_and_wasted(tmp_path):
    class EvenOnes(Lengths):
        def demand(self, problem: int, number: int) -> Demand:
            return Demand(10)

    config = tiny_config(tmp_path, rollout=ROLLOUT | {"filter": {"equal_rewards": True}})
    prediction = simulate(config, models(), EvenOnes(), num_iterations=1)
    fates = {trace.problem: trace.fate for trace in prediction.traces}
    assert fates == {0: Fate.TRAINED, 1: Fate.FILTERED, 2: Fate.TRAINED}
    assert prediction.wasted_share == pytest.approx(1 / 3)


def test_redundancy_shortens_the_wait_for_the_slowest(tmp_path):
    workload = SampledWorkload(20, 1.0, 200)
    rollout = {"num_groups": 16, "group_size": 4, "max_new_tokens": 200, "slots_per_engine": 128}
    config = tiny_config(tmp_path, rollout=rollout, model={"kind": "scratch", "max_positions": 256})
    machines = models(grader=GraderModel((0.0,)), trainer=TrainerModel(1, Cost(1.0), Cost(1.0)))
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
    rows = recommend(config, models(), SampledWorkload(10, 0.0, 20), num_iterations=1)
    splits = {row.overrides[:2] for row in rows}
    assert splits == {
        ("placement.trainer=[0]", "placement.engines=1-3"),
        ("placement.trainer=0-1", "placement.engines=2-3"),
        ("placement.trainer=0-2", "placement.engines=[3]"),
    }
    assert rows[0].overrides[0] == "placement.trainer=0-2", "training is most of the time here"


def test_the_grid_gives_engines_of_several_devices_whole_groups(tmp_path):
    config = tiny_config(
        tmp_path,
        cluster={"devices_per_node": 4},
        placement={"trainer": [0, 1], "engines": [2, 3]},
        inference={"kind": "vllm", "tensor_parallel": 2},
        rollout=ROLLOUT,
    )
    rows = recommend(config, models(), SampledWorkload(10, 0.0, 20), num_iterations=1)
    assert {row.overrides[:2] for row in rows} == {("placement.trainer=0-1", "placement.engines=2-3")}


# -------------------------------------------------------------------------------------------------- fitting
def timings_of(prediction: Prediction) -> list[dict[str, float]]:
    """What the manifests of a simulated run would say."""
    spans = stage_spans(prediction.stages)
    return [
        {span.stage: span.end - span.begin for span in spans if span.iteration == number and span.stage != "commit"}
        | {"wall": end - begin}
        for number, (begin, end) in iterations_of(spans).items()
    ]


def traces_of(prediction: Prediction) -> list[list[AttemptTrace]]:
    by_iteration: dict[float, list[AttemptTrace]] = {}
    for trace in prediction.traces:
        by_iteration.setdefault(trace.consumed_at, []).append(trace)
    return list(by_iteration.values())


@pytest.mark.parametrize(("slots", "async_ratio"), [(16, 0), (64, 0), (64, 1)])
def test_models_are_found_again_in_what_they_recorded(tmp_path, slots, async_ratio):
    """With fewer slots than attempts, too: who waits inside an engine, for a slot or for new weights, is not slow."""
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


def test_a_span_counts_from_when_it_got_a_slot():
    spans = [Span("e", 0.0, 4.0, 4), Span("e", 0.0, 2.0, 2), Span("e", 0.0, 5.0, 3), Span("e", 0.0, 1.0, 0)]
    assert [(span.begin, span.end) for span in with_slot_times(spans, 2)] == [(0.0, 4.0), (0.0, 2.0), (2.0, 5.0)]


def test_least_squares_without_negative_weights():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative_least_squares(columns, np.array([3.0, 5.0, 7.0])).tolist() == pytest.approx([1.0, 2.0])
    assert non_negative_least_squares(columns, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])


def test_recorded_groups_stay_together_and_know_whether_they_were_useful():
    def trace(problem: int, fate: Fate, num_tokens: int) -> AttemptTrace:
        return AttemptTrace(problem, 0, fate, 1, 0, 0.0, (Span("e", 0.0, 1.0, num_tokens),), None, None, 2.0)

    workload = recorded_workload(
        [trace(0, Fate.TRAINED, 5), trace(0, Fate.TRAINED, 6), trace(1, Fate.FILTERED, 50), trace(1, Fate.ABORTED, 6)]
    )
    for problem in range(20):
        lengths = {workload.demand(problem, number).num_tokens for number in range(3)}
        assert lengths == ({5, 6} if workload.is_useful(problem) else {50})
    assert len({workload.is_useful(problem) for problem in range(20)}) == 2
