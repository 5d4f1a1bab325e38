"""What scheduling attempts one by one, and working ahead of training, is worth when completions have a long tail.

    python -m benchmarks.async_speedup [--iterations 26] [--only rlvr,agent,filtered] [--output docs/async.md]

Real Ray actors: four engines, a trainer that trains, a scheduler, reward workers; the same attempts (by seed) and the same
devices for every way of scheduling. The engines are rehearsals: they take the time that generation would take, with these
tails, so that two cores can carry what would need a cluster:

    rlvr      completions of 10 tokens (median), lognormal with sigma 1.2, 25 ms a token: of a batch of 128, the longest
              takes over 20 times as long as the median one
    agent     short completions, and five times an environment that answers after 20 ms (median), lognormal, sigma 1.6
    filtered  as rlvr, and groups whose rewards are equal are replaced: most are, since these completions are random

Ways: batch-synchronous asks each engine for whole groups, grades when all attempts of the batch are done, and draws again
for what the filter left out; its agents act in step, each turn as long as its slowest environment. Queue-scheduled lets
every attempt go its own way and grades each group as it comes; replicated asks for every attempt by itself; redundant keeps
more groups in flight than it needs; asynchronous works ahead. Simulated is the real scheduler in virtual time, with the same
attempts, and a trainer that takes what the real one took. Length distance is how far lengths that were trained on are from
those of all attempts that were drawn (Kolmogorov and Smirnov's, with the chance to see such a one between equals).
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
"""Iterations left out: allocators settle, and what works ahead has to get ahead first."""
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


@dataclass(frozen=True)
class Way:
    name: str
    rollout: dict[str, object] = field(default_factory=dict)
    batch_synchronous: bool = False


WAYS = [
    Way("batch-synchronous", batch_synchronous=True),
    Way("+ replicated"),
    Way("+ 4 redundant groups", {"redundant_groups": 4}),
    Way("asynchronous, ratio 1", {"async_ratio": 1}),
    Way("asynchronous, ratio 2", {"async_ratio": 2}),
    Way("asynchronous, ratio 4", {"async_ratio": 4}),
]
FILTERED_WAYS = [
    Way("batch-synchronous", batch_synchronous=True),
    Way("+ replicated"),
    Way("+ 16 redundant groups", {"redundant_groups": 16}),
    Way("asynchronous, ratio 2", {"async_ratio": 2}),
]


def config_of(tail: str, way: Way, iterations: int, folder: Path) -> RunConfig:
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
            "rollout": rollout | filtered | way.rollout,
            "training": {"micro_batch_tokens": 4096, "row_tokens": 1024, "epochs": 4},
            "cluster": {"devices_per_node": 5},
            "placement": {"trainer": [0], "engines": [1, 2, 3, 4], "reward_workers": 2},
            "store": {"uri": f"file://{folder}/store"},
            "work_dir": str(folder / "work"),
        },
        way.name,
    )


# -------------------------------------------------------------------------------------------------- batch-synchronous
def turns_of(latency: RehearsalInference, request: GenerationRequest) -> list[float]:
    """Seconds of each turn of an attempt, its environment included; of what has no environment, of all of it."""
    arrivals_T = plan_generation(latency, request).arrivals_T
    turns = latency.environment.turns if latency.environment else 0
    ends = [float(arrivals_T[(turn + 1) * len(arrivals_T) // (turns + 1)]) for turn in range(turns)]
    return [end - begin for begin, end in pairwise([0.0, *ends, float(arrivals_T[-1])])]


class Round:
    """Requests that are with engines; it is over when all are done, and not before their turns, in step, would be."""

    def __init__(self, latency: RehearsalInference) -> None:
        self._latency = latency
        self._left = 0
        self._over = asyncio.Event()

    def enter(self, requests: list[GenerationRequest]) -> None:
        if not self._left:
            self._over, self._began, self._slowest = asyncio.Event(), time.monotonic(), [0.0]
        self._left += len(requests)
        for request in requests:
            turns = turns_of(self._latency, request)
            slowest = [*self._slowest, *[0.0] * (len(turns) - len(self._slowest))]
            self._slowest = [max(pair) for pair in zip(slowest, turns, strict=True)]

    def done(self, count: int) -> None:
        self._left -= count
        if not self._left:
            self._over.set()

    async def over(self) -> None:
        await self._over.wait()
        await asyncio.sleep(max(0.0, self._began + math.fsum(self._slowest) - time.monotonic()))


@dataclass(frozen=True)
class AllAtOnce:
    """An engine that gives nothing back before all of a round are done, on all engines."""

    name: str
    engine: RemoteEngine
    round: Round

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        self.round.enter(requests)
        done: list[Completion] = []
        async for completions in self.engine.generate(requests):
            done += completions
            self.round.done(len(completions))
        await self.round.over()
        yield done

    async def abort(self, request_ids: list[str]) -> None:
        await self.engine.abort(request_ids)

    async def ping(self) -> None:
        await self.engine.ping()


class BatchSchedulerRole(SchedulerRole):
    def __init__(
        self, config: RunConfig, run: RunRef, scratch: Path, engines: Sequence[EngineClient], graders: list[RemoteGrader]
    ):
        assert isinstance(config.inference, RehearsalInference)
        at_once = Round(config.inference)
        # Engines get the whole batch at once, and run what they have slots for.
        rollout = config.rollout.model_copy(update={"slots_per_engine": config.rollout.num_trajectories})
        config = config.model_copy(update={"rollout": rollout})
        super().__init__(config, run, scratch, [AllAtOnce(e.name, e, at_once) for e in engines], graders)  # type: ignore[arg-type, misc]


class BatchFleet(Fleet):
    scheduler_role = BatchSchedulerRole


# -------------------------------------------------------------------------------------------------- what was measured
@dataclass(frozen=True)
class Iteration:
    seconds: float
    stages: dict[str, float]
    collected: Collected


@dataclass(frozen=True)
class Measured:
    way: Way
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
        """Share of the tokens generated."""
        wasted = sum(iteration.collected.metrics["rollout/wasted_tokens"] for iteration in self.counted)
        return wasted / (wasted + sum(iteration.collected.num_tokens for iteration in self.counted))


def measure(tail: str, way: Way, iterations: int) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(tail, way, iterations, folder)
        run = open_run(ObjectStore(config.store.uri), config)
        leg_dir = folder / "work" / run.run_id / "leg-1"
        leg_dir.mkdir(parents=True)
        with (BatchFleet if way.batch_synchronous else Fleet)(run, config, leg_dir) as fleet:
            iterations = iterate(fleet, config)
            refs = [trace for iteration in iterations if (trace := iteration.collected.trace) is not None]
            fleet.wait_until_stored(refs)
            store = ObjectStore(config.store.uri)
            return Measured(way, config, iterations, [attempt for ref in refs for attempt in decode_trace(store.get(ref))])


def iterate(fleet: Fleet, config: RunConfig) -> list[Iteration]:
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


# -------------------------------------------------------------------------------------------------- what was to be expected
def rehearsed_request(config: RunConfig, problem: int, number: int) -> GenerationRequest:
    seed = derive_seed(config.seed, "attempt", problem, number)
    return GenerationRequest("", (0,), config.rollout.max_new_tokens, 1.0, STOP, seed)


@dataclass(frozen=True)
class Rehearsed:
    """The very attempts that the rehearsal engines were given, for a simulation."""

    config: RunConfig
    useful: dict[int, bool]

    def demand(self, problem: int, number: int) -> Demand:
        latency = self.config.inference
        assert isinstance(latency, RehearsalInference)
        arrivals_T = plan_generation(latency, rehearsed_request(self.config, problem, number)).arrivals_T
        generating = latency.seconds_to_first_token + latency.seconds_per_token * len(arrivals_T)
        return Demand(len(arrivals_T), float(arrivals_T[-1]) - generating)

    def is_useful(self, problem: int) -> bool:
        return self.useful.get(problem, problem % 3 == 0)


def bound(measured: Measured) -> float:
    """Seconds an iteration should take, counted as the measured ones are."""
    config, latency = measured.config, measured.config.inference
    assert isinstance(latency, RehearsalInference)
    draws = [i.collected.draws for i in measured.iterations]
    useful = {d.first + place: letter != "f" for d in draws for place, letter in enumerate(d.outcomes)}
    work = Rehearsed(config, useful)
    trainer = TrainerModel(
        num_devices=1,
        prepare=Cost(measured.stage("prepare")),
        update=Cost(measured.stage("update")),
        publish_seconds=measured.stage("publish"),
    )
    if measured.way.batch_synchronous:  # of a filter's rounds only the first
        return trainer.prepare.seconds + trainer.update.seconds + trainer.publish_seconds + longest(measured)
    models = MachineModels(
        EngineModel(latency.seconds_to_first_token, latency.seconds_per_token), GraderModel((0.0,)), trainer
    )
    predicted = simulate(config, models, work, config.iterations)
    return statistics.fmean(predicted.iteration_seconds[WARM_UP:])


def longest(measured: Measured) -> float:
    """Mean over batches of the time of their turns in step, each as long as its slowest; further rounds are left out."""
    config, latency = measured.config, measured.config.inference
    assert isinstance(latency, RehearsalInference)

    def turns(problem: int, number: int) -> list[float]:
        return turns_of(latency, rehearsed_request(config, problem, number))

    pages = [iteration.collected.draws for iteration in measured.counted]
    return statistics.fmean(
        math.fsum(
            max(turn)
            for turn in zip(
                *(turns(p, n) for p in range(page.first, page.next) for n in range(config.rollout.group_size)), strict=True
            )
        )
        for page in pages
    )


def batches(measured: Measured, work: Rehearsed) -> list[list[float]]:
    """Seconds of every attempt that was drawn, batch by batch."""
    size, latency = measured.config.rollout.group_size, measured.config.inference
    assert isinstance(latency, RehearsalInference)

    def seconds(problem: int, number: int) -> float:
        demand = work.demand(problem, number)
        return latency.seconds_to_first_token + latency.seconds_per_token * demand.num_tokens + demand.waiting_seconds

    pages = [iteration.collected.draws for iteration in measured.counted]
    return [[seconds(problem, n) for problem in range(page.first, page.next) for n in range(size)] for page in pages]


def length_distance(measured: Measured) -> tuple[float, float]:
    """Between what was trained on and what was drawn, and how likely so much is by chance (asymptotically)."""
    work = Rehearsed(measured.config, {})
    trained = sorted(trace.num_tokens for trace in measured.traces if trace.fate is Fate.TRAINED)
    drawn = sorted(work.demand(trace.problem, trace.attempt).num_tokens for trace in measured.traces)
    places = sorted({*trained, *drawn})
    distance = max(abs(bisect_right(trained, at) / len(trained) - bisect_right(drawn, at) / len(drawn)) for at in places)
    scaled = distance * math.sqrt(len(trained) * len(drawn) / (len(trained) + len(drawn)))
    chance = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)) if scaled > 0.2 else 1.0
    return distance, min(1.0, max(0.0, chance))


# -------------------------------------------------------------------------------------------------- what is printed
COLUMNS = (
    *("way", "seconds an iteration", "iterations a second", "speed-up", "of which waiting for rollouts", "speed-up of that"),
    *(
        "tokens wasted",
        "staleness mean",
        "max",
        "length distance",
        "its chance",
        "simulated seconds",
        "measured / simulated",
    ),
)


def table(tail: str, rows: list[Measured]) -> str:
    base = rows[0]
    lines = [f"## {tail}", "", "| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    for row in rows:
        expected, (distance, chance) = bound(row), length_distance(row)
        cells = [
            row.way.name,
            f"{row.seconds:.2f}",
            f"{1 / row.seconds:.2f}",
            f"{base.seconds / row.seconds:.2f}",
            f"{row.stage('collect'):.2f}",
            f"{base.stage('collect') / row.stage('collect'):.2f}",
            f"{row.wasted:.0%}",
            f"{row.metric('rollout/staleness_mean'):.2f}",
            f"{max(iteration.collected.metrics['rollout/staleness_max'] for iteration in row.counted):.0f}",
            f"{distance:.3f}",
            f"{chance:.2g}",
            f"{expected:.2f}",
            f"{row.seconds / expected:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Longest attempt of a batch over its median one: {tail_of(base):.0f} times.", ""])


def tail_of(measured: Measured) -> float:
    """Mean over batches, in seconds of an attempt that nothing hinders."""
    ratios = [max(seconds) / statistics.median(seconds) for seconds in batches(measured, Rehearsed(measured.config, {}))]
    return statistics.fmean(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=26)
    parser.add_argument("--only", default=",".join(TAILS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    tables = []
    for tail in options.only.split(","):
        ways, iterations = (FILTERED_WAYS, options.iterations // 2) if tail == "filtered" else (WAYS, options.iterations)
        tables.append(table(tail, [measure(tail, way, iterations) for way in ways]))
        print(tables[-1], flush=True)
    if options.output:
        said = ["# Scheduling against long tails", "", "```", (__doc__ or "").strip(), "```", ""]
        options.output.write_text("\n".join([*said, *tables]))


if __name__ == "__main__":
    main()
