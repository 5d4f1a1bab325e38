"""Whatever finishes, fails and dies in whatever order: no attempt is lost or counted twice, every draw is accounted for."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.config.rollout import GroupFilter, RolloutConfig
from roll_core.errors import RewardUnavailable, RoleDied, RollError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.planning.virtual_time import run_in_virtual_time
from roll_core.rollout.filter import is_useful
from roll_core.rollout.lifecycle import NEXT, Lifecycle, Place, State, Terms
from roll_core.rollout.metrics import describe_lives
from roll_core.rollout.router import Deaths, Router
from roll_core.rollout.scheduler import Finished, Rollout, RolloutScheduler
from roll_core.seeds import derive_seed
from roll_core.types.manifest import CollectRequest, Draws
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Failure, Message, Problem, Score, Speaker, Trajectory

FIRST_PROBLEM = 7


def schedules(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


# -------------------------------------------------------------------------------------------------- by hand
def begun(terms: Terms) -> Lifecycle:
    """With everything that was drawn at the engines."""
    lives = Lifecycle(terms, now=0.0)
    issue(lives)
    return lives


def issue(lives: Lifecycle) -> list[Place]:
    issued = []
    while (place := lives.next_queued()) is not None:
        lives.generating(place, now=0.0)
        issued.append(place)
    return issued


def end(lives: Lifecycle, place: Place, reward: float | None, num_tokens: int = 5) -> None:
    lives.generated(place, num_tokens, now=1.0)
    assert lives.to_grade(now=1.0) == [place]
    lives.graded(place, reward, now=2.0)


def differ(rewards: list[float]) -> bool:
    return len(set(rewards)) > 1


def test_a_group_that_is_not_useful_is_replaced_at_once_by_the_next():
    lives = begun(Terms(num_groups=2, group_size=2, is_useful=differ))
    assert lives.new_draws() == [0, 1]
    end(lives, (1, 0), 1.0)
    end(lives, (1, 1), 1.0)
    assert lives.new_draws() == [2]
    assert issue(lives) == [(2, 0), (2, 1)]
    for place, reward in {(0, 0): 0.0, (0, 1): 1.0, (2, 1): 0.5, (2, 0): 0.0}.items():
        assert not lives.is_full
        end(lives, place, reward)
    assert lives.is_full
    assert lives.is_settled
    assert lives.outcomes == "tft"
    assert lives.consumed == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_a_group_nobody_could_grade_is_kept_without_a_filter_and_replaced_with_one():
    for useful, outcomes in ((None, "t"), (differ, "x")):
        lives = begun(Terms(num_groups=1, group_size=2, max_draws=1, is_useful=useful))
        end(lives, (0, 0), None)
        end(lives, (0, 1), None)
        assert lives.outcomes == outcomes
        assert lives.is_settled


def test_redundant_attempts_are_aborted_when_enough_are_graded_and_the_baseline_is_waited_for():
    lives = begun(Terms(num_groups=1, group_size=2, greedy_baseline=True, redundant_attempts=2))
    end(lives, (0, 3), 1.0)
    end(lives, (0, 0), None)  # a failed one is made good for
    end(lives, (0, 2), 0.0, num_tokens=7)
    assert lives.to_abort() == [(0, 1)]
    assert not lives.is_full
    end(lives, (0, GREEDY_ATTEMPT), 1.0)
    assert lives.is_full
    assert not lives.is_settled  # an engine still has one
    lives.generated((0, 1), num_tokens=3, now=3.0)
    assert lives.is_settled
    assert lives.consumed == [(0, -1), (0, 0), (0, 2), (0, 3)]
    metrics = describe_lives(lives.groups)
    assert metrics["rollout/aborted_attempts"] == 1.0
    assert metrics["rollout/wasted_tokens"] == 3.0
    assert metrics["rollout/mean_tokens_consumed"] == pytest.approx(17 / 3)
    assert metrics["rollout/mean_tokens_generated"] == 5.0
    assert (metrics["rollout/mean_seconds_generating"], metrics["rollout/mean_seconds_grading"]) == (1.0, 1.0)


def test_redundant_groups_are_aborted_when_the_batch_is_full_wherever_their_attempts_are():
    lives = Lifecycle(Terms(num_groups=1, group_size=1, redundant_groups=3), now=0.0)
    for place in ((0, 0), (1, 0), (2, 0)):
        lives.generating(place, now=0.0)
    end(lives, (1, 0), 1.0)
    assert lives.outcomes == "ataa"
    assert lives.to_abort() == [(0, 0), (2, 0)]
    assert lives.next_queued() is None
    lives.lost((0, 0), now=2.0)  # its engine died over it
    lives.generated((2, 0), 4, now=2.0)  # had finished before it heard
    assert lives.is_settled
    assert [lives.state_of((group, 0)) for group in range(4)] == [State.ABORTED, State.GRADED, State.ABORTED, State.ABORTED]


def test_a_grade_for_what_was_aborted_says_nothing():
    lives = begun(Terms(num_groups=1, group_size=1, redundant_attempts=1))
    for number in (0, 1):
        lives.generated((0, number), 5, now=1.0)
    assert lives.to_grade(now=1.0) == [(0, 0), (0, 1)]
    lives.graded((0, 1), 1.0, now=2.0)
    lives.graded((0, 0), 0.0, now=2.0)
    assert lives.consumed == [(0, 1)]


@pytest.mark.parametrize(
    ("impossible", "says"),
    [
        (lambda lives: lives.generating((0, 0), 1.0), r"attempt \(0, 0\) is generating and cannot become generating"),
        (lambda lives: lives.graded((0, 0), 1.0, 1.0), r"attempt \(0, 0\) is generating and cannot become graded"),
        (lambda lives: (end(lives, (0, 1), 1.0), end(lives, (0, 1), 1.0)), r"attempt \(0, 1\) is graded and cannot"),
        (lambda lives: (end(lives, (0, 1), 1.0), lives.lost((0, 1), 1.0)), r"attempt \(0, 1\) is graded and cannot"),
    ],
)
def test_an_impossible_transition_names_the_attempt(impossible, says):
    with pytest.raises(AssertionError, match=says):
        impossible(begun(Terms(num_groups=1, group_size=2)))


@pytest.mark.parametrize(
    ("keep", "rewards", "useful"),
    [
        (GroupFilter(equal_rewards=True), [1.0, 1.0], False),
        (GroupFilter(equal_rewards=True), [0.0, 1e-9], True),
        (GroupFilter(min_spread=0.5), [0.25, 0.5], False),
        (GroupFilter(min_spread=0.5), [0.25, 0.75], True),
        (GroupFilter(min_mean=0.5), [0.0, 0.75], False),
        (GroupFilter(min_mean=0.5), [0.25, 0.75], True),
        (GroupFilter(max_mean=0.5), [0.5, 0.75], False),
        (GroupFilter(min_mean=0.25, max_mean=0.5), [0.25, 0.75], True),
    ],
)
def test_filters_by_hand(keep, rewards, useful):
    assert is_useful(keep, rewards) is useful


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"filter": {}}, "it leaves nothing out"),
        ({"filter": {"min_mean": 0.9, "max_mean": 0.1}}, "min_mean .0.9. must not be above max_mean .0.1."),
        ({"filter": {"equal_rewards": True}, "group_size": 1}, "one reward has no spread"),
        ({"max_draws": 0.5}, "greater than or equal to 1"),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(section, says):
    with pytest.raises(ValueError, match=says):
        RolloutConfig.model_validate(section)


# -------------------------------------------------------------------------------------------------- a world to run it in
@dataclass(frozen=True)
class Schedule:
    """Everything that chance decides in one run, from a few numbers."""

    seed: int
    num_groups: int
    group_size: int
    greedy: bool
    filtered: bool
    redundant_groups: int
    redundant_attempts: int
    num_engines: int
    num_graders: int
    slots: int
    share_failing: float
    deaths: int
    outages: int

    @property
    def config(self) -> RolloutConfig:
        return RolloutConfig(
            num_groups=self.num_groups,
            group_size=self.group_size,
            slots_per_engine=self.slots,
            filter=GroupFilter(min_mean=0.4) if self.filtered else None,
            max_draws=4,
            redundant_groups=self.redundant_groups,
            redundant_attempts=self.redundant_attempts,
        )

    @property
    def is_redundant(self) -> bool:
        return bool(self.redundant_groups or self.redundant_attempts)


SCHEDULE = st.builds(
    Schedule,
    seed=st.integers(0, 2**32),
    num_groups=st.integers(1, 5),
    group_size=st.integers(1, 4),
    greedy=st.booleans(),
    filtered=st.booleans(),
    redundant_groups=st.sampled_from([0, 0, 1, 3]),
    redundant_attempts=st.sampled_from([0, 0, 1, 2]),
    num_engines=st.integers(1, 3),
    num_graders=st.integers(1, 2),
    slots=st.sampled_from([1, 2, 5, 64]),
    share_failing=st.sampled_from([0.0, 0.2, 0.6]),
    deaths=st.integers(0, 3),
    outages=st.integers(0, 1),
)


def grade_of(seed: int, share_failing: float) -> Score | Failure:
    """What a reward says of the attempt with this seed, always."""
    rng = random.Random(seed)
    if rng.random() < share_failing:
        return Failure("grade", "boom")
    return Score(rng.choice([0.0, 0.5, 1.0]), False)


class World:
    """Engines and graders of one leg, with their own times of finishing and dying."""

    def __init__(self, schedule: Schedule, leg: int):
        self.schedule = schedule
        self.rng = random.Random(f"{schedule.seed}/{leg}")
        self.at_engines: Counter[str] = Counter()
        self.issued: Counter[str] = Counter()
        self.known: set[str] = set()
        self.most_at_once = 0
        self.outages = schedule.outages if leg == 0 else 0
        self.engines = [FakeEngine(f"engine {number}", self) for number in range(schedule.num_engines)]
        self.graders = [FakeGrader(f"grader {number}", self) for number in range(schedule.num_graders)]
        mortal = [*self.engines, *self.graders]
        for victim in self.rng.sample(mortal, min(schedule.deaths if leg < 2 else 0, len(mortal))):
            victim.dies_at = self.rng.uniform(0.0, 12.0)

    def scheduler(self) -> RolloutScheduler:
        return RolloutScheduler(
            self.schedule.config,
            seed=self.schedule.seed,
            source=Numbered(),
            renderer=Plain(),
            engines=self.engines,
            graders=self.graders,
            greedy_baseline=self.schedule.greedy,
        )


class Numbered:
    domains = ("numbers",)

    def problem(self, index: int) -> Problem:
        return Problem(f"numbers/{index}", "numbers", (Message(Speaker.USER, str(index)),), "")


class Plain:
    stop_token_ids = (1,)

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return (int(messages[0].text),)

    def text(self, token_ids: tuple[int, ...]) -> str:
        return str(token_ids[0]) if token_ids else ""


@dataclass
class FakeEngine:
    """Tokens say the seed they were made from; when they come is chance."""

    name: str
    world: World
    dies_at: float = math.inf
    at_work: dict[str, tuple[asyncio.TimerHandle, asyncio.Queue, GenerationRequest]] = field(default_factory=dict)

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        loop, world = asyncio.get_running_loop(), self.world
        ended: asyncio.Queue[Completion | None] = asyncio.Queue()
        death = loop.call_at(self.dies_at, ended.put_nowait, None) if self.dies_at < math.inf else None
        ids = {request.request_id for request in requests}
        world.at_engines.update(ids)
        world.issued.update(ids)
        assert max(world.at_engines.values()) == 1, "an attempt is with two engines, or twice with one"
        assert not ids & world.known, "an attempt that an earlier leg had finished is made again"
        world.most_at_once = max(world.most_at_once, world.at_engines.total())
        for request in requests:
            timer = loop.call_later(world.rng.expovariate(0.5), self.end, request.request_id, Ending.STOP)
            self.at_work[request.request_id] = (timer, ended, request)
        assert len(self.at_work) <= self.most_requests(), "more requests than an engine has room for"
        try:
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

    def most_requests(self) -> int:
        return self.world.schedule.slots + -(-self.world.schedule.slots // 4)

    def end(self, request_id: str, ending: Ending) -> None:
        timer, ended, request = self.at_work[request_id]
        timer.cancel()
        self.forget(request_id)
        count = 1 + request.seed % 5 if ending is Ending.STOP else 1
        ended.put_nowait(Completion(request_id, (request.seed,) * count, (-0.1,) * count, (0,) * count, ending))

    def forget(self, request_id: str) -> None:
        if request_id in self.at_work:
            self.at_work.pop(request_id)[0].cancel()
            del self.world.at_engines[request_id]

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.sleep(self.world.rng.choice([0.0, 0.5]))
        if asyncio.get_running_loop().time() >= self.dies_at:
            raise RoleDied(f"{self.name} died while generating")
        for request_id in request_ids:
            if request_id in self.at_work:
                self.end(request_id, Ending.ABORTED)


@dataclass
class FakeGrader:
    name: str
    world: World
    dies_at: float = math.inf

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure | RewardUnavailable]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(min(self.world.rng.expovariate(1.0), max(0.0, self.dies_at - loop.time())))
        if loop.time() >= self.dies_at:
            raise RoleDied(f"{self.name} died while grading")
        if self.world.outages and self.world.rng.random() < 0.2:
            self.world.outages -= 1
            return [RewardUnavailable("judge: 503")] * len(items)
        return [grade_of(t.turns[0].completion_ids[0], self.world.schedule.share_failing) for _, t in items]


def collect(schedule: Schedule) -> tuple[Rollout | RollError, list[World]]:
    """Legs until one succeeds, each with what those before it had finished; or the sentence that there are too few."""
    request = CollectRequest(
        iteration=1, parent="", weights_version=0, first_problem=FIRST_PROBLEM, num_groups=schedule.num_groups
    )
    finished: Finished = {}
    worlds: list[World] = []
    for leg in range(5):
        worlds.append(World(schedule, leg))
        finished = {place: replace(t, failure=None) for place, t in finished.items()}
        worlds[-1].known = {f"{group}/{number}" for group, number in finished}
        try:
            return run_in_virtual_time(worlds[-1].scheduler().collect(request, 1e6, finished)), worlds
        except (RoleDied, RewardUnavailable):
            continue
        except RollError as error:
            return error, worlds
    raise AssertionError("legs without deaths and outages do not fail")


def seed_of(schedule: Schedule, place: Place) -> int:
    return derive_seed(schedule.seed, "attempt", FIRST_PROBLEM + place[0], place[1])


def expected(schedule: Schedule) -> tuple[str, list[Place]]:
    """What a collect without redundancy comes to, one problem after the other."""
    outcomes, places = "", []
    while outcomes.count("t") < schedule.num_groups and len(outcomes) < 4 * schedule.num_groups:
        group = len(outcomes)
        grades = [
            grade_of(seed_of(schedule, (group, number)), schedule.share_failing) for number in range(schedule.group_size)
        ]
        rewards = [grade.value for grade in grades if isinstance(grade, Score)]
        if schedule.filtered and not rewards:
            outcomes += "x"
        elif schedule.filtered and math.fsum(rewards) / len(rewards) < 0.4:
            outcomes += "f"
        else:
            outcomes += "t"
            places += [(group, number) for number in range(-1 if schedule.greedy else 0, schedule.group_size)]
    return outcomes, places


def told(trajectories: list[Trajectory]) -> dict[Place, tuple[tuple[int, ...], Score | Failure | None]]:
    return {(t.group, t.attempt): (t.turns[0].completion_ids, t.score or t.failure) for t in trajectories}


@schedules(1100)
@given(SCHEDULE)
def test_without_redundancy_the_outcome_is_that_of_one_problem_after_the_other(schedule):
    """Whatever the times, deaths and outages; with the very tokens and grades of every attempt."""
    schedule = replace(schedule, redundant_groups=0, redundant_attempts=0)
    rollout, worlds = collect(schedule)
    outcomes, places = expected(schedule)
    if outcomes.count("t") < schedule.num_groups:
        assert isinstance(rollout, RollError)
        assert f"of {len(outcomes)} problems drawn only {outcomes.count('t')} were useful" in str(rollout)
        return
    assert isinstance(rollout, Rollout)
    assert rollout.draws == Draws(first=FIRST_PROBLEM, outcomes=outcomes)
    assert [(t.group, t.attempt) for t in rollout.trajectories] == places
    for place, (tokens, grade) in told(rollout.trajectories).items():
        seed = seed_of(schedule, place)
        assert tokens == (seed,) * (1 + seed % 5)
        assert grade == grade_of(seed, schedule.share_failing)
    attempts = schedule.group_size + schedule.greedy
    assert rollout.metrics["rollout/aborted_attempts"] == 0.0
    for world in worlds:
        assert world.at_engines.total() == 0
        assert world.most_at_once <= schedule.num_groups * attempts
        assert all(count <= 1 + schedule.deaths for count in world.issued.values())
    if len(worlds) == 1 and not schedule.deaths:
        assert set(worlds[0].issued.values()) == {1}
        assert worlds[0].issued.total() == len(outcomes) * attempts


@schedules(1100)
@given(SCHEDULE)
def test_with_redundancy_the_batch_is_whole_and_everything_else_is_accounted_for(schedule):
    rollout, worlds = collect(schedule)
    assert all(world.at_engines.total() == 0 for world in worlds)
    if isinstance(rollout, RollError):
        assert schedule.filtered
        return
    outcomes, metrics = rollout.draws.outcomes, rollout.metrics
    assert outcomes.count("t") == schedule.num_groups
    assert {t.group for t in rollout.trajectories} == {group for group, letter in enumerate(outcomes) if letter == "t"}
    assert len(told(rollout.trajectories)) == len(rollout.trajectories)
    assert metrics["rollout/drawn_groups"] == len(outcomes) == outcomes.count("t") + sum(map(outcomes.count, "fxa"))
    assert outcomes.count("a") <= schedule.redundant_groups
    made = schedule.group_size + schedule.redundant_attempts
    for group in {t.group for t in rollout.trajectories}:
        attempts = {t.attempt: t for t in rollout.trajectories if t.group == group}
        assert (GREEDY_ATTEMPT in attempts) == schedule.greedy
        rewards = [t.score.value for number, t in attempts.items() if number != GREEDY_ATTEMPT and t.score is not None]
        assert len(rewards) == schedule.group_size or (
            len(rewards) < schedule.group_size and len(attempts) == made + schedule.greedy
        )
        if schedule.filtered:
            assert math.fsum(rewards) / len(rewards) >= 0.4
    consumed = sum(t.num_completion_tokens for t in rollout.trajectories)
    assert metrics["rollout/wasted_tokens"] >= 0.0
    if outcomes.count("t") == len(outcomes) and not metrics["rollout/aborted_attempts"]:
        assert metrics["rollout/wasted_tokens"] == 0.0
    assert consumed > 0


@schedules(600)
@given(SCHEDULE, st.integers(0, 2**32))
def test_whatever_happens_next_every_life_is_a_legal_path_and_ends(schedule, chance):
    """The state machine alone, driven by chance: loss, failure and any order of events."""
    rng = random.Random(chance)
    config = schedule.config
    terms = Terms(
        config.num_groups,
        config.group_size,
        schedule.greedy,
        config.redundant_groups,
        config.redundant_attempts,
        max_draws=20,
        is_useful=(lambda rewards: max(rewards) > 0.5) if schedule.filtered else None,
    )
    lives = Lifecycle(terms, now=0.0)
    engines: list[Place] = []
    graders: list[Place] = []
    losses = 20
    for now in range(1, 100_000):
        lives.to_abort()
        if lives.is_settled:
            break
        if (place := lives.next_queued()) is not None and (not engines or rng.random() < 0.5):
            lives.generating(place, now)
            engines.append(place)
        graders += lives.to_grade(now) if rng.random() < 0.7 or not engines else []
        held = rng.choice([holder for holder in (engines, graders) if holder] or [[]])
        if not held:
            continue
        place = held.pop(rng.randrange(len(held)))
        if losses and rng.random() < 0.1:
            losses -= 1
            lives.lost(place, now)
        elif held is engines:
            lives.generated(place, 1 + now % 3, now)
        else:
            lives.graded(place, None if rng.random() < schedule.share_failing else rng.choice([0.0, 1.0]), now)
    assert lives.is_settled
    every = [life for group in lives.groups for life in group.attempts]
    assert len(every) == lives.num_attempts
    for life in every:
        assert life.state in (State.GRADED, State.FAILED, State.ABORTED)
        assert all(after in NEXT[before] for (before, _), (after, _) in pairwise(life.history))
        assert [now for _, now in life.history] == sorted(now for _, now in life.history)
    if not lives.is_full:
        assert len(lives.groups) == 20
        assert schedule.filtered
    assert len(lives.outcomes) == len(lives.groups)
    consumed = set(lives.consumed)
    wasted = sum(life.num_tokens for life in every if life.place not in consumed)
    assert describe_lives(lives.groups)["rollout/wasted_tokens"] == wasted


# -------------------------------------------------------------------------------------------------- the router alone
def routed(router: Router, group: int, count: int, first: int = 0) -> list[str]:
    """The engines that attempts of a group are given to."""
    for number in range(first, first + count):
        assert router.assign(group, GenerationRequest(f"{group}/{number}", (1,), 4, 1.0, (1,), number))
    return [router._engine_of[f"{group}/{number}"] for number in range(first, first + count)]


def router(slots: int, *names: str) -> Router:
    world = World(Schedule(0, 1, 1, False, False, 0, 0, 1, 1, slots, 0.0, 0, 0), leg=0)
    return Router([FakeEngine(name, world) for name in names], slots, Deaths(), lambda event: None)


def test_a_group_stays_with_one_engine_and_the_next_goes_to_the_one_with_less_to_do():
    two = router(64, "a", "b")
    assert routed(two, group=0, count=8) == ["a"] * 8
    assert routed(two, group=1, count=4) == ["b"] * 4
    assert routed(two, group=2, count=2) == ["b"] * 2
    assert routed(two, group=0, count=1, first=8) == ["a"]


def test_a_group_leaves_an_engine_that_is_well_behind():
    two = router(8, "a", "b")  # a quarter of 8 slots is the margin
    assert routed(two, group=0, count=5) == ["a", "a", "a", "b", "b"]


def test_engines_get_no_more_than_they_have_room_for():
    one = router(4, "a")
    assert routed(one, group=0, count=5) == ["a"] * 5
    assert not one.assign(1, GenerationRequest("1/0", (1,), 4, 1.0, (1,), 0))
