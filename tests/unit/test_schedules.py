"""Random schedules of the real rollout scheduler, in virtual time, with fake engines and graders.

Completions, failures, deaths, outages, kills and new weights come in any order, synchronous or ahead. No attempt is lost or
counted twice, every draw is accounted for, and no token is too old.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.config.rollout import GroupFilter, InFlightPolicy, RolloutConfig
from roll_core.errors import RewardUnavailable, RoleDied, RollError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.lifecycle import AttemptId
from roll_core.rollout.router import Grade, GradingItem
from roll_core.rollout.scheduler import Rollout, RolloutScheduler
from roll_core.rollout.stream import Finished
from roll_core.seeds import derive_seed
from roll_core.simulation.virtual_time import run_in_virtual_time
from roll_core.types.manifest import CollectRequest
from roll_core.types.trace import Fate
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Failure, Message, Problem, Score, Speaker, Trajectory

FIRST_PROBLEM = 7
MAX_DRAWS = 4
ABORT_S = 0.5
"""Longest time that a fake engine takes to abort a request, in seconds."""


def schedules(count: int) -> settings:
    """Hypothesis settings for `count` random schedules, without a deadline."""
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Schedule:
    """Random settings of one run; all times and failures follow from them."""

    seed: int
    num_iterations: int
    async_ratio: float
    in_flight: InFlightPolicy
    pauses: bool
    num_groups: int
    group_size: int
    greedy: bool
    filtered: bool
    redundant_groups: int
    redundant_attempts: int
    num_engines: int
    num_graders: int
    slots: int
    tokens: int | None
    share_failing: float
    share_unposed: float
    deaths: int
    outages: int
    kills: int

    @property
    def config(self) -> RolloutConfig:
        return RolloutConfig(
            num_groups=self.num_groups,
            group_size=self.group_size,
            slots_per_engine=self.slots,
            tokens_per_engine=self.tokens,
            filter=GroupFilter(min_mean=0.4) if self.filtered else None,
            max_draws=MAX_DRAWS,
            redundant_groups=self.redundant_groups,
            redundant_attempts=self.redundant_attempts,
            async_ratio=self.async_ratio,
            in_flight=self.in_flight,
        )

    @property
    def most_in_flight(self) -> int:
        """Largest number of attempts that may be with engines at once."""
        groups = self.num_groups + math.floor(self.async_ratio * self.num_groups) + self.redundant_groups
        return groups * (self.group_size + self.redundant_attempts + self.greedy)


SCHEDULE = st.builds(
    Schedule,
    seed=st.integers(0, 2**32),
    num_iterations=st.integers(1, 4),
    async_ratio=st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 3.0]),
    in_flight=st.sampled_from(list(InFlightPolicy)),
    pauses=st.booleans(),
    num_groups=st.integers(1, 5),
    group_size=st.integers(1, 4),
    greedy=st.booleans(),
    filtered=st.booleans(),
    redundant_groups=st.sampled_from([0, 0, 1, 3]),
    redundant_attempts=st.sampled_from([0, 0, 1, 2]),
    num_engines=st.integers(1, 3),
    num_graders=st.integers(1, 2),
    slots=st.sampled_from([1, 2, 5, 64]),
    tokens=st.sampled_from([None, None, 12]),
    share_failing=st.sampled_from([0.0, 0.2, 0.6]),
    share_unposed=st.sampled_from([0.0, 0.0, 0.3]),
    deaths=st.integers(0, 3),
    outages=st.integers(0, 1),
    kills=st.integers(0, 2),
)


def seed_of(schedule: Schedule, attempt_id: AttemptId) -> int:
    return derive_seed(schedule.seed, "attempt", *attempt_id)


def can_be_posed(schedule: Schedule, problem: int) -> bool:
    return random.Random(derive_seed(schedule.seed, "posed", problem)).random() >= schedule.share_unposed


def tokens_of(seed: int) -> tuple[int, ...]:
    """All tokens of an attempt, on whatever engine: each encodes the seed and its position."""
    return tuple(10 * seed + position for position in range(1 + seed % 5))


def grade_of(seed: int, share_failing: float) -> Score | Failure:
    """Grade of the attempt with this seed, the same in every call."""
    rng = random.Random(seed)
    if rng.random() < share_failing:
        return Failure("grade", "boom")
    return Score(rng.choice([0.0, 0.5, 1.0]), False)


class World:
    """Fake engines and graders of one leg, with random times of finishing and dying."""

    def __init__(self, schedule: Schedule, leg: int, version: int):
        self.schedule = schedule
        self.rng = random.Random(f"{schedule.seed}/{leg}")
        self.at_engines: Counter[str] = Counter()
        self.issued: Counter[str] = Counter()
        self.most_at_once = 0
        self.outages = schedule.outages if leg == 0 else 0
        self.killed_at = self.rng.uniform(1.0, 25.0) if leg < schedule.kills else math.inf
        self.engines = [FakeEngine(f"engine {number}", self, version) for number in range(schedule.num_engines)]
        self.graders = [FakeGrader(f"grader {number}", self) for number in range(schedule.num_graders)]
        mortal = [*self.engines, *self.graders]
        for victim in self.rng.sample(mortal, min(schedule.deaths if leg < 2 else 0, len(mortal))):
            victim.dies_at = self.rng.uniform(0.0, 25.0)

    async def adopt(self, version: int) -> None:
        """Let every living engine adopt new weights, each after a random delay."""
        alive = [engine for engine in self.engines if engine.dies_at > asyncio.get_running_loop().time()]
        await asyncio.gather(*(engine.adopt(version, self.schedule.in_flight) for engine in alive))


class NumberedProblems:
    """Problem source in which the prompt of a problem is its index."""

    domains = ("numbers",)

    def problem(self, index: int) -> Problem:
        return Problem(f"numbers/{index}", "numbers", (Message(Speaker.USER, str(index)),), "")


@dataclass(frozen=True)
class PlainRenderer:
    """Renderer whose prompt is one token, the index of the problem. Some problems cannot be posed."""

    schedule: Schedule
    stop_token_ids = (-1,)

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        problem = int(messages[0].text)
        if not can_be_posed(self.schedule, problem):
            raise ValueError("no such token")
        return (problem,)

    def text(self, token_ids: tuple[int, ...]) -> str:
        return str(len(token_ids))


@dataclass
class InFlight:
    """Request in flight on a fake engine, with the weights versions of its tokens so far."""

    request: GenerationRequest
    ended: asyncio.Queue
    timer: asyncio.TimerHandle
    since: float
    until: float
    left: tuple[int, ...]
    versions: list[int] = field(default_factory=list)

    def catch_up(self, now: float, version: int) -> None:
        """Count the tokens generated since the last call for this version. The last token comes at the end."""
        share = (now - self.since) / (self.until - self.since)
        made = min(len(self.left) - 1, int(share * len(self.left)))
        self.versions += [version] * (made - len(self.versions))


@dataclass
class FakeEngine:
    """Engine whose tokens encode the seed of their attempt and arrive after random times."""

    name: str
    world: World
    version: int
    dies_at: float = math.inf
    running: dict[str, InFlight] = field(default_factory=dict)
    admits: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self):
        self.admits.set()

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        loop, world = asyncio.get_running_loop(), self.world
        ended: asyncio.Queue[Completion | None] = asyncio.Queue()
        death = loop.call_at(self.dies_at, ended.put_nowait, None) if self.dies_at < math.inf else None
        ids = {request.request_id for request in requests}
        world.at_engines.update(ids)
        world.issued.update(ids)
        assert max(world.at_engines.values()) == 1, "an attempt is with two engines, or twice with one"
        world.most_at_once = max(world.most_at_once, world.at_engines.total())
        try:
            await self.admits.wait()
            for request in requests:
                left = tokens_of(request.seed)[len(request.prefix_ids) :]
                assert request.prefix_ids == tokens_of(request.seed)[: len(request.prefix_ids)]
                seconds = world.rng.expovariate(0.5)
                timer = loop.call_later(seconds, self.end, request.request_id, Ending.STOP)
                self.running[request.request_id] = InFlight(request, ended, timer, loop.time(), loop.time() + seconds, left)
            while ids:
                together = [await ended.get()]
                while not ended.empty():
                    together.append(ended.get_nowait())
                if None in together or loop.time() >= self.dies_at:
                    raise RoleDied(f"{self.name} died while generating")
                ids -= {completion.request_id for completion in together}
                yield together
        finally:
            if death is not None:
                death.cancel()
            for request_id in ids:
                self.forget(request_id)

    def end(self, request_id: str, ending: Ending) -> None:
        run = self.running[request_id]
        run.catch_up(asyncio.get_running_loop().time(), self.version)
        if ending is Ending.STOP:
            run.versions += [self.version] * (len(run.left) - len(run.versions))
        count = len(run.versions)
        self.forget(request_id)
        run.ended.put_nowait(Completion(request_id, run.left[:count], (-0.1,) * count, tuple(run.versions), ending))

    def forget(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.pop(request_id).timer.cancel()
        del self.world.at_engines[request_id]

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.sleep(self.world.rng.choice([0.0, ABORT_S]))
        if asyncio.get_running_loop().time() >= self.dies_at:
            raise RoleDied(f"{self.name} died while generating")
        await self.admits.wait()
        for request_id in request_ids:
            if request_id in self.running:
                self.end(request_id, Ending.ABORTED)

    async def adopt(self, version: int, in_flight: InFlightPolicy) -> None:
        await asyncio.sleep(self.world.rng.uniform(0.0, 1.0))
        if in_flight is InFlightPolicy.FINISH:
            self.admits.clear()
            while self.running and asyncio.get_running_loop().time() < self.dies_at:
                await asyncio.sleep(0.1)
        for request_id, run in list(self.running.items()):
            run.catch_up(asyncio.get_running_loop().time(), self.version)
            if in_flight is InFlightPolicy.RESUME:
                self.end(request_id, Ending.ABORTED)
        self.version = version
        self.admits.set()


@dataclass
class FakeGrader:
    """Grader with random delays, outages and a time of death."""

    name: str
    world: World
    dies_at: float = math.inf

    async def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(min(self.world.rng.expovariate(1.0), max(0.0, self.dies_at - loop.time())))
        if loop.time() >= self.dies_at:
            raise RoleDied(f"{self.name} died while grading")
        if self.world.outages and self.world.rng.random() < 0.2:
            self.world.outages -= 1
            yield [(index, RewardUnavailable("judge: 503")) for index in range(len(items))]
            return
        grades = [grade_of(t.turns[0].completion_ids[0] // 10, self.world.schedule.share_failing) for _, t in items]
        yield list(enumerate(grades))


@dataclass
class Run:
    """Run as the store has it: committed rollouts and journaled trajectories."""

    committed: list[Rollout] = field(default_factory=list)
    kept: Finished = field(default_factory=dict)
    worlds: list[World] = field(default_factory=list)
    too_few: str = ""

    @property
    def next_problem(self) -> int:
        return self.committed[-1].draws.next if self.committed else FIRST_PROBLEM

    def keep(self, trajectory: Trajectory) -> None:
        self.kept[trajectory.group, trajectory.attempt] = replace(trajectory, failure=None)

    def is_done(self, schedule: Schedule) -> bool:
        return bool(self.too_few) or len(self.committed) == schedule.num_iterations


async def leg(schedule: Schedule, run: Run, world: World) -> None:
    """Run one leg: collect, adopt and commit until the run is done or a role fails."""
    scheduler = RolloutScheduler(
        schedule.config,
        seed=schedule.seed,
        max_positions=4096,
        source=NumberedProblems(),
        renderer=PlainRenderer(schedule),
        engines=world.engines,
        graders=world.graders,
        num_iterations=schedule.num_iterations,
        greedy_baseline=schedule.greedy,
        finished=dict(run.kept),
        keep=run.keep,
    )
    try:
        while not run.is_done(schedule):
            version = len(run.committed)
            request = CollectRequest(
                iteration=version + 1,
                parent="",
                weights_version=version,
                first_problem=run.next_problem,
                num_groups=schedule.num_groups,
            )
            rollout = await scheduler.collect(request, 1e6)
            if schedule.pauses:
                paused = world.rng.sample([e.name for e in world.engines], world.rng.randint(1, len(world.engines)))
                asked_at = asyncio.get_running_loop().time()
                await scheduler.pause(paused)
                if schedule.in_flight is not InFlightPolicy.FINISH:
                    assert asyncio.get_running_loop().time() <= asked_at + ABORT_S, "an engine was given more to do"
                running = {engine.name for engine in world.engines if engine.running}
                assert not running & set(paused), "an engine was not left alone"
            await asyncio.sleep(world.rng.uniform(0.0, 6.0))
            await world.adopt(version + 1)
            if schedule.pauses:
                scheduler.resume(paused)
            scheduler.adopted(version + 1)
            await asyncio.sleep(world.rng.choice([0.0, 1.0]))
            run.committed.append(rollout)
    except (RoleDied, RewardUnavailable):
        for trajectory in scheduler.finished.values():
            run.keep(trajectory)
    except RollError as error:
        run.too_few = str(error)
    finally:
        await scheduler.close()


async def leg_until_killed(schedule: Schedule, run: Run, world: World) -> None:
    """Run one leg until it ends or the time of its kill."""
    task = asyncio.create_task(leg(schedule, run, world))
    done, _ = await asyncio.wait([task], timeout=world.killed_at if world.killed_at < math.inf else None)
    if done:
        task.result()
    else:
        task.cancel()


def run_all_legs(schedule: Schedule) -> Run:
    """Run leg after leg, each with the journal of those before it, until all iterations are committed."""
    run = Run()
    for number in range(8):
        run.worlds.append(World(schedule, number, version=len(run.committed)))
        run_in_virtual_time(leg_until_killed(schedule, run, run.worlds[-1]))
        if run.is_done(schedule):
            return run
    raise AssertionError("legs without deaths, outages and kills do not fail")


def expected(schedule: Schedule) -> list[tuple[str, list[AttemptId]]]:
    """Outcomes and attempts of each iteration without redundancy, computed one problem after the other."""
    iterations, problem = [], FIRST_PROBLEM
    for _ in range(schedule.num_iterations):
        outcomes, attempt_ids = "", []
        while outcomes.count("t") < schedule.num_groups:
            numbers = range(schedule.group_size)
            grades = [grade_of(seed_of(schedule, (problem, number)), schedule.share_failing) for number in numbers]
            rewards = [grade.value for grade in grades if isinstance(grade, Score)]
            if not can_be_posed(schedule, problem) or (schedule.filtered and not rewards):
                outcomes += "x"
            elif schedule.filtered and math.fsum(rewards) / len(rewards) < 0.4:
                outcomes += "f"
            else:
                first = -1 if schedule.greedy else 0
                attempt_ids += [(len(outcomes), number) for number in range(first, schedule.group_size)]
                outcomes += "t"
            problem += 1
        iterations.append((outcomes, attempt_ids))
    return iterations


def check_iteration(schedule: Schedule, trained_version: int, rollout: Rollout) -> None:
    """Assert what holds for every batch, with redundancy or without."""
    first = rollout.draws.first
    attempt_ids = [(t.group, t.attempt) for t in rollout.trajectories]
    assert attempt_ids == sorted(set(attempt_ids)), "an attempt is there twice, or out of order"
    for t in rollout.trajectories:
        seed = seed_of(schedule, (first + t.group, t.attempt))
        (turn,) = t.turns
        assert turn.completion_ids == tokens_of(seed)
        assert list(turn.weights_versions) == sorted(turn.weights_versions)
        assert all(0 <= trained_version - v <= math.ceil(schedule.async_ratio) for v in turn.weights_versions)
        assert (t.score or t.failure) == grade_of(seed, schedule.share_failing)
    outcomes = rollout.draws.outcomes
    assert outcomes.count("t") == schedule.num_groups
    assert {group for group, _ in attempt_ids} == {group for group, letter in enumerate(outcomes) if letter == "t"}
    assert rollout.metrics["rollout/drawn_groups"] == len(outcomes)
    check_trace(schedule, rollout)


def check_trace(schedule: Schedule, rollout: Rollout) -> None:
    """Assert that the trace has every attempt, with times in order."""
    attempts = schedule.group_size + schedule.redundant_attempts + schedule.greedy
    assert len(rollout.trace) == len(rollout.draws.outcomes) * attempts
    trained = {(t.problem - rollout.draws.first, t.attempt): t for t in rollout.trace if t.fate is Fate.TRAINED}
    assert set(trained) == {(t.group, t.attempt) for t in rollout.trajectories if t.failure is None}
    for t in rollout.trajectories:
        if t.failure is None:
            trace = trained[t.group, t.attempt]
            assert trace.num_tokens == t.num_completion_tokens
            assert trace.drawn_at <= trace.spans[0].begin <= trace.spans[-1].end <= trace.graded_at <= trace.consumed_at


def check_run(schedule: Schedule, run: Run) -> None:
    """Assert that iterations draw one after the other, and that every batch is valid."""
    next_problem = FIRST_PROBLEM
    for version, rollout in enumerate(run.committed):
        assert rollout.draws.first == next_problem, "a draw is in no page, or in two"
        next_problem = rollout.draws.next
        check_iteration(schedule, version, rollout)


@schedules(700)
@given(SCHEDULE)
def test_without_redundancy_the_ledger_is_that_of_collecting_one_problem_after_the_other(schedule):
    """Times, deaths, outages, kills and weights updates change neither outcomes nor the tokens and grades of any attempt."""
    schedule = replace(schedule, redundant_groups=0, redundant_attempts=0)
    run = run_all_legs(schedule)
    check_run(schedule, run)
    assert all(world.most_at_once <= schedule.most_in_flight for world in run.worlds)
    wanted = expected(schedule)
    for (outcomes, attempt_ids), rollout in zip(wanted, run.committed, strict=False):
        assert rollout.draws.outcomes == outcomes
        assert [(t.group, t.attempt) for t in rollout.trajectories] == attempt_ids
        assert rollout.metrics["rollout/aborted_attempts"] == 0.0
    if run.too_few:
        outcomes, _ = wanted[len(run.committed)]
        assert len(outcomes) > MAX_DRAWS * schedule.num_groups
        assert "problems drawn only" in run.too_few
    undisturbed = not (schedule.deaths or schedule.outages or schedule.kills or schedule.pauses)
    if undisturbed and schedule.in_flight is not InFlightPolicy.RESUME:
        assert set(run.worlds[0].issued.values()) == {1}


@schedules(500)
@given(SCHEDULE)
def test_with_redundancy_batches_are_full_and_all_other_attempts_are_accounted_for(schedule):
    run = run_all_legs(schedule)
    check_run(schedule, run)
    assert not run.too_few or schedule.filtered or schedule.share_unposed
    made = schedule.group_size + schedule.redundant_attempts
    for rollout in run.committed:
        for group in {t.group for t in rollout.trajectories}:
            attempts = {t.attempt: t for t in rollout.trajectories if t.group == group}
            assert (GREEDY_ATTEMPT in attempts) == schedule.greedy
            rewards = [t.score.value for number, t in attempts.items() if number != GREEDY_ATTEMPT and t.score is not None]
            assert len(rewards) == schedule.group_size or (
                len(rewards) < schedule.group_size and len(attempts) == made + schedule.greedy
            )
            if schedule.filtered:
                assert math.fsum(rewards) / len(rewards) >= 0.4
        wasted = sum(attempt.num_tokens for attempt in rollout.trace if attempt.fate not in (Fate.TRAINED, Fate.FAILED))
        alone = sum(t.num_completion_tokens for t in rollout.trajectories if t.failure is not None)
        failed = sum(attempt.num_tokens for attempt in rollout.trace if attempt.fate is Fate.FAILED)
        assert rollout.metrics["rollout/wasted_tokens"] == wasted + failed - alone
