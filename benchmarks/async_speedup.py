"""Speed-up by scheduling attempts one by one, and by generating ahead of training, when completions have a long tail.

    python -m benchmarks.async_speedup [--iterations 26] [--only rlvr,agent,filtered] [--output docs/benchmarks/async.md]

Needs two CPU cores. Starts real Ray actors: four engines, a trainer that trains, a rollout scheduler, reward workers. Every
scheduling gets the same attempts (by seed) and the same devices. The engines are rehearsals: they take the time that
generation would take, with the tails below, so that two cores can carry what would need a cluster.

    rlvr      completions of 10 tokens (median), lognormal with sigma 1.2, 25 ms per token: in a batch of 128, the longest
              takes over 20 times as long as the median
    agent     short completions with five waits for an environment: 20 ms (median), lognormal with sigma 1.6
    filtered  as rlvr, and groups whose rewards are equal are replaced; most are, since these completions are random

Schedulings:

    batch-synchronous     gives the engines the whole batch at once, grades when all its attempts are done, and draws again
                          for groups that the filter dropped. Agents act in lockstep: a turn lasts as long as its slowest
                          environment.
    attempts one by one   starts each attempt when an engine has a free slot, and grades it when it is done: roll's default
    + N redundant groups  also keeps N more groups in flight than the batch needs (rollout.redundant_groups)
    asynchronous          also generates ahead of training (rollout.async_ratio)

The table prints means over iterations, without the first two. Simulated seconds are those of the real scheduler in virtual
time, with the same attempts and a trainer that takes as long as the measured one. Length distance is the Kolmogorov-Smirnov
distance between token counts of attempts trained on and of all attempts drawn; the p-value is the probability of such a
distance between equal distributions.
"""

import argparse
import asyncio
import logging
import math
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from roll_core.config.inference import RehearsalInference
from roll_core.config.load import validate_config
from roll_core.config.run import RunConfig
from roll_core.inference.rehearsal_engine import plan_generation
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.roles.fleet import Fleet
from roll_core.roles.scheduler_role import RemoteEngine, RemoteGrader, SchedulerRole
from roll_core.rollout.router import EngineClient
from roll_core.seeds import derive_seed
from roll_core.simulation.machines import Cost, EngineModel, GraderModel, TrainerModel
from roll_core.simulation.simulator import MachineModels, simulate
from roll_core.simulation.workload import Demand
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import open_run
from roll_core.store.records.traces import decode_trace
from roll_core.types.manifest import Collected, CollectRequest
from roll_core.types.refs import RunRef
from roll_core.types.trace import AttemptTrace, Fate

WARM_UP = 2
"""Iterations left out at the start: allocators settle, and asynchronous rollouts have to get ahead of training first."""
STOP = (1,)
RLVR = {"kind": "rehearsal", "seconds_per_token": 0.025, "median_tokens": 10, "sigma": 1.2}
TAILS: dict[str, dict[str, object]] = {
    "rlvr": RLVR,
    "agent": {
        "kind": "rehearsal",
        "seconds_per_token": 0.01,
        "median_tokens": 12,
        "sigma": 0.5,
        "environment": {"median_seconds": 0.02, "sigma": 1.6, "turns": 5},
    },
    "filtered": RLVR,
}
"""Section `inference` by tail: how long each completion takes."""


@dataclass(frozen=True)
class Scheduling:
    """Row of a table: overrides of the section `rollout`, or the batch-synchronous scheduler of this file."""

    name: str
    rollout: dict[str, object] = field(default_factory=dict)
    batch_synchronous: bool = False


SCHEDULINGS = [
    Scheduling("batch-synchronous", batch_synchronous=True),
    Scheduling("attempts one by one"),
    Scheduling("+ 4 redundant groups", {"redundant_groups": 4}),
    Scheduling("asynchronous, ratio 1", {"async_ratio": 1}),
    Scheduling("asynchronous, ratio 2", {"async_ratio": 2}),
    Scheduling("asynchronous, ratio 4", {"async_ratio": 4}),
]
FILTERED_SCHEDULINGS = [
    Scheduling("batch-synchronous", batch_synchronous=True),
    Scheduling("attempts one by one"),
    Scheduling("+ 16 redundant groups", {"redundant_groups": 16}),
    Scheduling("asynchronous, ratio 2", {"async_ratio": 2}),
]


def build_config(tail: str, scheduling: Scheduling, iterations: int, folder: Path) -> RunConfig:
    rollout = {"num_groups": 16, "group_size": 8, "max_new_tokens": 300, "slots_per_engine": 16}
    filtered = {"filter": {"equal_rewards": True}, "max_draws": 16} if tail == "filtered" else {}
    return validate_config(
        {
            "name": "tail",
            "iterations": iterations,
            "model": {"kind": "scratch", "max_positions": 320},
            "problems": {"kind": "arithmetic", "puzzle": "sort", "digits": 4},
            "reward": {"kind": "exact_match", "partial_credit": 0.5},
            "inference": TAILS[tail],
            "rollout": rollout | filtered | scheduling.rollout,
            "training": {"micro_batch_tokens": 4096, "row_tokens": 1024, "epochs": 4},
            "cluster": {"devices_per_node": 5},
            "placement": {"trainer": [0], "engines": [1, 2, 3, 4], "reward_workers": 2},
            "store": {"uri": f"file://{folder}/store"},
            "work_dir": str(folder / "work"),
        },
        scheduling.name,
    )


# -------------------------------------------------------------------------------------------------- batch-synchronous
def turn_seconds(latency: RehearsalInference, request: GenerationRequest) -> list[float]:
    """Seconds of each turn of an attempt, its environment included; without an environment, of the whole attempt."""
    arrivals_T = plan_generation(latency, request).arrivals_T
    turns = latency.environment.turns if latency.environment else 0
    ends = [float(arrivals_T[(turn + 1) * len(arrivals_T) // (turns + 1)]) for turn in range(turns)]
    return [end - begin for begin, end in pairwise([0.0, *ends, float(arrivals_T[-1])])]


class LockstepRound:
    """Barrier for the requests in flight on all engines. A round ends when all are done, and not before the sum over turns
    of the slowest attempt's seconds has passed."""

    def __init__(self, latency: RehearsalInference) -> None:
        self._latency = latency
        self._in_flight = 0
        self._ended = asyncio.Event()

    def begin(self, requests: list[GenerationRequest]) -> None:
        """Add requests to the round; start a new one if none is in flight."""
        if not self._in_flight:
            self._ended, self._began, self._slowest = asyncio.Event(), time.monotonic(), [0.0]
        self._in_flight += len(requests)
        for request in requests:
            turns = turn_seconds(self._latency, request)
            slowest = [*self._slowest, *[0.0] * (len(turns) - len(self._slowest))]
            self._slowest = [max(pair) for pair in zip(slowest, turns, strict=True)]

    def finish(self, count: int) -> None:
        """Count requests that are done; the last one ends the round."""
        self._in_flight -= count
        if not self._in_flight:
            self._ended.set()

    async def wait(self) -> None:
        """Wait until the round has ended and its turns in lockstep would have."""
        await self._ended.wait()
        await asyncio.sleep(max(0.0, self._began + math.fsum(self._slowest) - time.monotonic()))


@dataclass(frozen=True)
class BatchEngine:
    """Engine client that returns completions only when the whole round is done, on all engines."""

    name: str
    engine: RemoteEngine
    round: LockstepRound

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        self.round.begin(requests)
        done: list[Completion] = []
        async for completions in self.engine.generate(requests):
            done += completions
            self.round.finish(len(completions))
        await self.round.wait()
        yield done

    async def abort(self, request_ids: list[str]) -> None:
        await self.engine.abort(request_ids)

    async def ping(self) -> None:
        await self.engine.ping()


class BatchSchedulerRole(SchedulerRole):
    """Rollout scheduler whose engines return a batch as a whole."""

    def __init__(
        self, config: RunConfig, run: RunRef, scratch: Path, engines: Sequence[EngineClient], graders: list[RemoteGrader]
    ):
        assert isinstance(config.inference, RehearsalInference)
        shared = LockstepRound(config.inference)
        # The scheduler sends the whole batch at once; engines queue the requests that exceed their slots.
        rollout = config.rollout.model_copy(update={"slots_per_engine": config.rollout.num_trajectories})
        config = config.model_copy(update={"rollout": rollout})
        super().__init__(config, run, scratch, [BatchEngine(e.name, e, shared) for e in engines], graders)  # type: ignore[arg-type, misc]


class BatchFleet(Fleet):
    """Fleet with the batch-synchronous rollout scheduler."""

    scheduler_role = BatchSchedulerRole


# -------------------------------------------------------------------------------------------------- measurement
@dataclass(frozen=True)
class Iteration:
    """One measured iteration: seconds in all and by stage."""

    seconds: float
    stages: dict[str, float]
    collected: Collected


@dataclass(frozen=True)
class Measured:
    """Measured run of one scheduling. Means leave out the first `WARM_UP` iterations."""

    scheduling: Scheduling
    config: RunConfig
    iterations: list[Iteration]
    traces: list[AttemptTrace]

    @property
    def counted(self) -> list[Iteration]:
        return self.iterations[WARM_UP:]

    @property
    def seconds(self) -> float:
        return statistics.fmean(iteration.seconds for iteration in self.counted)

    def stage(self, name: str) -> float:
        return statistics.fmean(iteration.stages[name] for iteration in self.counted)

    def metric(self, name: str) -> float:
        return statistics.fmean(iteration.collected.metrics[name] for iteration in self.counted)

    @property
    def wasted(self) -> float:
        """Share of generated tokens that no iteration trained on."""
        wasted = sum(iteration.collected.metrics["rollout/wasted_tokens"] for iteration in self.counted)
        return wasted / (wasted + sum(iteration.collected.num_tokens for iteration in self.counted))


def measure(tail: str, scheduling: Scheduling, iterations: int) -> Measured:
    """Start all roles, run the iterations, and read the traces of all attempts from the store."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = build_config(tail, scheduling, iterations, folder)
        run = open_run(ObjectStore(config.store.uri), config)
        leg_dir = folder / "work" / run.run_id / "leg-1"
        leg_dir.mkdir(parents=True)
        with (BatchFleet if scheduling.batch_synchronous else Fleet)(run, config, leg_dir) as fleet:
            measured = iterate(fleet, config)
            refs = [trace for iteration in measured if (trace := iteration.collected.trace) is not None]
            fleet.wait_until_stored(refs)
            store = ObjectStore(config.store.uri)
            traces = [attempt for ref in refs for attempt in decode_trace(store.get(ref))]
            return Measured(scheduling, config, measured, traces)


def iterate(fleet: Fleet, config: RunConfig) -> list[Iteration]:
    """Collect, prepare, update and publish as many times as the config says; time each stage."""
    fleet.publish(0)
    iterations: list[Iteration] = []
    first_problem = 0
    for number in range(1, config.iterations + 1):
        request = CollectRequest(
            iteration=number,
            parent="",
            weights_version=number - 1,
            first_problem=first_problem,
            num_groups=config.rollout.num_groups,
        )
        times = [time.perf_counter()]
        collected = fleet.collect(request)
        times.append(time.perf_counter())
        prepared = fleet.prepare(collected)
        times.append(time.perf_counter())
        fleet.update(collected)
        times.append(time.perf_counter())
        fleet.publish(number)
        times.append(time.perf_counter())
        seconds = [end - begin for begin, end in pairwise(times)]
        stages = dict(zip(("collect", "prepare", "update", "publish"), seconds, strict=True))
        iterations.append(Iteration(times[-1] - times[0], stages, collected))
        first_problem = prepared.draws.next
    return iterations


# -------------------------------------------------------------------------------------------------- expectation
def rehearsed_request(config: RunConfig, problem: int, number: int) -> GenerationRequest:
    """Request with the seed of an attempt: the rehearsal derives its length and delays from the seed alone."""
    seed = derive_seed(config.seed, "attempt", problem, number)
    return GenerationRequest("", (0,), config.rollout.max_new_tokens, 1.0, STOP, seed)


@dataclass(frozen=True)
class RehearsedWorkload:
    """Workload of a simulation: the same attempts that the rehearsal engines were given."""

    config: RunConfig
    useful: dict[int, bool]
    """Problems of known outcome: False if the filter dropped their group. For other problems a third is useful."""

    def demand(self, problem: int, number: int) -> Demand:
        latency = self.config.inference
        assert isinstance(latency, RehearsalInference)
        arrivals_T = plan_generation(latency, rehearsed_request(self.config, problem, number)).arrivals_T
        generating = latency.seconds_to_first_token + latency.seconds_per_token * len(arrivals_T)
        return Demand(len(arrivals_T), float(arrivals_T[-1]) - generating)

    def is_useful(self, problem: int) -> bool:
        return self.useful.get(problem, problem % 3 == 0)


def expected_seconds(measured: Measured) -> float:
    """Seconds per iteration by simulation, or by the longest attempts if batch-synchronous; warm-up left out."""
    config, latency = measured.config, measured.config.inference
    assert isinstance(latency, RehearsalInference)
    draws = [i.collected.draws for i in measured.iterations]
    useful = {d.first + offset: letter != "f" for d in draws for offset, letter in enumerate(d.outcomes)}
    workload = RehearsedWorkload(config, useful)
    trainer = TrainerModel(
        num_devices=1,
        prepare=Cost(measured.stage("prepare")),
        update=Cost(measured.stage("update")),
        publish_seconds=measured.stage("publish"),
    )
    if measured.scheduling.batch_synchronous:  # only the first round: a filter's further rounds are not counted
        return trainer.prepare.seconds + trainer.update.seconds + trainer.publish_seconds + lockstep_seconds(measured)
    models = MachineModels(
        EngineModel(latency.seconds_to_first_token, latency.seconds_per_token), GraderModel((0.0,)), trainer
    )
    predicted = simulate(config, models, workload, config.iterations)
    return statistics.fmean(predicted.iteration_seconds[WARM_UP:])


def lockstep_seconds(measured: Measured) -> float:
    """Mean seconds of a batch whose turns run in lockstep, each as long as its slowest attempt; one round per batch."""
    config, latency = measured.config, measured.config.inference
    assert isinstance(latency, RehearsalInference)

    def turns(problem: int, number: int) -> list[float]:
        return turn_seconds(latency, rehearsed_request(config, problem, number))

    draws = [iteration.collected.draws for iteration in measured.counted]
    return statistics.fmean(
        math.fsum(
            max(turn)
            for turn in zip(
                *(turns(p, n) for p in range(drawn.first, drawn.next) for n in range(config.rollout.group_size)), strict=True
            )
        )
        for drawn in draws
    )


def attempt_seconds(measured: Measured, workload: RehearsedWorkload) -> list[list[float]]:
    """Seconds that every drawn attempt takes on an engine without queueing, one list per batch."""
    size, latency = measured.config.rollout.group_size, measured.config.inference
    assert isinstance(latency, RehearsalInference)

    def seconds(problem: int, number: int) -> float:
        demand = workload.demand(problem, number)
        return latency.seconds_to_first_token + latency.seconds_per_token * demand.num_tokens + demand.waiting_seconds

    draws = [iteration.collected.draws for iteration in measured.counted]
    return [[seconds(problem, n) for problem in range(drawn.first, drawn.next) for n in range(size)] for drawn in draws]


def length_distance(measured: Measured) -> tuple[float, float]:
    """Kolmogorov-Smirnov distance between token counts of trained and of drawn attempts, and its asymptotic p-value."""
    workload = RehearsedWorkload(measured.config, {})
    trained = sorted(trace.num_tokens for trace in measured.traces if trace.fate is Fate.TRAINED)
    drawn = sorted(workload.demand(trace.problem, trace.attempt).num_tokens for trace in measured.traces)
    lengths = sorted({*trained, *drawn})
    distance = max(abs(bisect_right(trained, at) / len(trained) - bisect_right(drawn, at) / len(drawn)) for at in lengths)
    scaled = distance * math.sqrt(len(trained) * len(drawn) / (len(trained) + len(drawn)))
    p_value = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)) if scaled > 0.2 else 1.0
    return distance, min(1.0, max(0.0, p_value))


# -------------------------------------------------------------------------------------------------- table
COLUMNS = (
    *("scheduling", "seconds per iteration", "iterations per second", "speed-up"),
    *("seconds waiting for rollouts", "speed-up of waiting", "tokens wasted", "mean staleness", "max staleness"),
    *("length distance", "p-value", "simulated seconds", "measured / simulated"),
)


def table(tail: str, rows: list[Measured]) -> str:
    """Markdown table of one tail; speed-ups are against the first row."""
    base = rows[0]
    lines = [f"## {tail}", "", "| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    for row in rows:
        expected, (distance, p_value) = expected_seconds(row), length_distance(row)
        cells = [
            row.scheduling.name,
            f"{row.seconds:.2f}",
            f"{1 / row.seconds:.2f}",
            f"{base.seconds / row.seconds:.2f}",
            f"{row.stage('collect'):.2f}",
            f"{base.stage('collect') / row.stage('collect'):.2f}",
            f"{row.wasted:.0%}",
            f"{row.metric('rollout/staleness_mean'):.2f}",
            f"{max(iteration.collected.metrics['rollout/staleness_max'] for iteration in row.counted):.0f}",
            f"{distance:.3f}",
            f"{p_value:.2g}",
            f"{expected:.2f}",
            f"{row.seconds / expected:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Longest attempt of a batch over the median: {longest_over_median(base):.0f} times.", ""])


def longest_over_median(measured: Measured) -> float:
    """Seconds of the longest attempt over those of the median attempt; mean over batches, without queueing."""
    batches = attempt_seconds(measured, RehearsedWorkload(measured.config, {}))
    return statistics.fmean(max(seconds) / statistics.median(seconds) for seconds in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=26)
    parser.add_argument("--only", default=",".join(TAILS), help="tails to measure, separated by commas")
    parser.add_argument("--output", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    tables = []
    for tail in options.only.split(","):
        is_filtered = tail == "filtered"
        schedulings = FILTERED_SCHEDULINGS if is_filtered else SCHEDULINGS
        iterations = options.iterations // 2 if is_filtered else options.iterations
        tables.append(table(tail, [measure(tail, scheduling, iterations) for scheduling in schedulings]))
        print(tables[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(tables))


if __name__ == "__main__":
    main()
