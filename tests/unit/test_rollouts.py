"""Trajectories as Parquet, problems by seed, rewards, and the scheduler with engines and graders made for the test."""

import asyncio
import importlib
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace

import pyarrow.parquet as pq
import pytest

from roll_core.config.problems import ArithmeticProblems, JsonlProblems, Puzzle
from roll_core.config.rollout import GroupFilter, RolloutConfig
from roll_core.data.arithmetic import ArithmeticSource
from roll_core.data.jsonl import JsonlSource
from roll_core.errors import DeadlineExceeded, RewardError, RewardUnavailable, RoleDied, RollError, UserError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.models import characters
from roll_core.rewards.exact_match import ExactMatchReward, matching_share
from roll_core.rewards.number_match import NumberMatchReward
from roll_core.rollout.filter import build_filter
from roll_core.rollout.journal import Journal
from roll_core.rollout.meters import Meter, MeterReading
from roll_core.rollout.metrics import accuracy, batch_metrics
from roll_core.rollout.renderer import CharacterRenderer
from roll_core.rollout.scheduler import RolloutScheduler
from roll_core.rollout.stream import Finished
from roll_core.seeds import derive_seed
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import decode_trajectories, encode_trajectories
from roll_core.types.manifest import CollectRequest
from roll_core.types.trajectory import Ending, Failure, Message, Problem, Score, Speaker, Trajectory
from tests.support import trajectory

REQUEST = CollectRequest(iteration=1, parent="p" * 64, weights_version=3, first_problem=10, num_groups=4)


# -------------------------------------------------------------------------------------------------- Parquet
def test_trajectories_survive_parquet_and_give_the_same_bytes_again(tmp_path):
    trajectories = [trajectory(0, 0, 1.0), trajectory(0, 1, None), trajectory(1, 0, 0.25, completion=7)]
    data = encode_trajectories(trajectories)
    assert decode_trajectories(data) == trajectories
    assert encode_trajectories(decode_trajectories(data)) == data
    (tmp_path / "t.parquet").write_bytes(data)
    assert pq.read_table(tmp_path / "t.parquet").column("group").to_pylist() == [0, 0, 1]


# -------------------------------------------------------------------------------------------------- problems
def test_problems_depend_on_seed_and_index_alone():
    source, again = (ArithmeticSource(ArithmeticProblems(), seed=5) for _ in range(2))
    assert [source.problem(i) for i in (7, 3)] == [again.problem(i) for i in (7, 3)]
    assert source.problem(7) != ArithmeticSource(ArithmeticProblems(), seed=6).problem(7)


def test_held_out_problems_are_never_trained_on_and_do_not_depend_on_the_seed():
    source = ArithmeticSource(ArithmeticProblems(digits=3), seed=5)
    held_out = {p.messages[0].text for p in source.held_out(50)}
    assert len(held_out) == 50
    assert held_out == {p.messages[0].text for p in ArithmeticSource(ArithmeticProblems(digits=3), seed=9).held_out(50)}
    trained = {source.problem(i).messages[0].text for i in range(3000)}
    assert not held_out & trained
    assert not held_out & {source.demonstration(i).problem.messages[0].text for i in range(500)}


@pytest.mark.parametrize(
    ("puzzle", "question", "answer"),
    [(Puzzle.SORT, "40213>", "01234"), (Puzzle.REVERSE, "40213<", "31204"), (Puzzle.ADD, "17+25=", "042")],
)
def test_puzzles_have_the_right_answers(puzzle, question, answer):
    source = ArithmeticSource(ArithmeticProblems(puzzle=puzzle, digits=2 if puzzle is Puzzle.ADD else 5), seed=0)
    for problem in (source.problem(i) for i in range(20)):
        text = problem.messages[0].text
        assert (text[-1], len(problem.answer)) == (question[-1], len(answer))
        if puzzle is Puzzle.SORT:
            assert problem.answer == "".join(sorted(text[:-1]))
        elif puzzle is Puzzle.REVERSE:
            assert problem.answer == text[-2::-1]
        else:
            assert int(problem.answer) == sum(map(int, text[:-1].split("+")))


def test_noisy_demonstrations_are_well_formed():
    source = ArithmeticSource(ArithmeticProblems(digits=5, demonstration_noise=1.0), seed=0)
    demonstrations = [source.demonstration(i) for i in range(200)]
    assert all(sorted(d.completion) == sorted(d.problem.answer) for d in demonstrations)
    assert sum(d.completion == d.problem.answer for d in demonstrations) < 20


def test_more_held_out_problems_than_exist_is_one_sentence():
    with pytest.raises(UserError, match=r"evaluation.num_problems \(256\) is more than problems.digits=1 can give"):
        ArithmeticSource(ArithmeticProblems(digits=1), seed=0).held_out(256)


def test_jsonl_problems_come_in_a_seeded_order_once_per_pass(tmp_path):
    lines = [f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    config = JsonlProblems(train=str(tmp_path / "train.jsonl"), held_out=str(tmp_path / "train.jsonl"))
    source = JsonlSource(config, seed=1)
    first, second = ([source.problem(5 * epoch + i).answer for i in range(5)] for epoch in range(2))
    assert sorted(first) == sorted(second) == ["1", "2", "3", "4", "5"]
    assert first != second
    assert [p.answer for p in source.held_out(2)] == ["1", "2"]


@pytest.mark.parametrize(
    ("text", "says"), [('{"prompt": "a"}', "line 1 of"), ("nonsense", "line 1 of"), ("", "holds no problems")]
)
def test_a_bad_jsonl_file_is_one_sentence(tmp_path, text, says):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(UserError, match=f"problems.train: .*{says}|problems.train: {says}"):
        JsonlSource(JsonlProblems(train=str(tmp_path / "t.jsonl"), held_out="x"), seed=0)


def test_seeds_differ_by_place_and_are_stable():
    assert derive_seed(0, "collect", 4, 2) == derive_seed(0, "collect", 4, 2)
    assert len({derive_seed(0, "collect", i, j) for i in range(50) for j in range(50)}) == 2500
    assert derive_seed(0, "a") != derive_seed(1, "a")


# -------------------------------------------------------------------------------------------------- rewards
def grade(reward, text: str, answer: str) -> Score:
    answered = trajectory(0, 0, 0.0)
    answered = replace(answered, turns=(replace(answered.turns[0], text=text),))
    problem = Problem("p/1", "p", (Message(Speaker.USER, "?"),), answer)
    return asyncio.run(reward(problem, answered))


def test_exact_match_pays_for_right_answers_and_in_part_for_right_positions():
    assert grade(ExactMatchReward(0.5), " 01234\n", "01234") == Score(1.0, True)
    assert grade(ExactMatchReward(0.5), "01243", "01234") == Score(0.5 * 3 / 5, False)
    assert grade(ExactMatchReward(0.0), "01243", "01234") == Score(0.0, False)


def test_missing_and_superfluous_positions_cost():
    assert (matching_share("0143", "0134"), matching_share("01", "0134"), matching_share("", "")) == (0.5, 0.5, 0.0)


def test_number_match_takes_the_last_number():
    assert grade(NumberMatchReward(0.0), "6 times 7 is 42.", "42").correct
    assert grade(NumberMatchReward(0.0), "it is 1,042", "1042").correct
    assert not grade(NumberMatchReward(0.0), "no idea", "42").correct
    assert grade(NumberMatchReward(0.01), "-0.499", "-0.5").correct


def test_a_problem_that_cannot_be_graded_raises_instead_of_scoring_zero():
    with pytest.raises(RewardError, match="reward 'number_match' could not grade problem p/1"):
        grade(NumberMatchReward(0.0), "42", "forty-two")


# -------------------------------------------------------------------------------------------------- scheduler
@dataclass
class EchoEngine:
    """Answers with the prompt, in an order of its own; `stuck` requests come back only when they are aborted."""

    name: str
    stuck: int = 0
    seen: list[GenerationRequest] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        self.seen += requests
        for request in reversed(requests[self.stuck :]):
            tokens = (*request.prompt_ids[:-1], characters.EOS)
            count = len(tokens)
            yield [Completion(request.request_id, tokens, (-0.1,) * count, (3,) * count, Ending.STOP)]
        if self.stuck:
            await self.aborted.wait()
            yield [Completion(request.request_id, (), (), (), Ending.ABORTED) for request in requests[: self.stuck]]

    async def abort(self, request_ids: list[str]) -> None:
        assert len(request_ids) == self.stuck, "nothing here is redundant"
        self.aborted.set()


class ExactGrader:
    """Grades as the reward role does, and fails on attempts it is told to."""

    def __init__(self, failing_attempt: int | None = None):
        self.name = "grader"
        self._failing = failing_attempt

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure]:
        return [
            Failure("grade", "boom") if t.attempt == self._failing else Score(0.5, p.answer == t.turns[-1].text)
            for p, t in items
        ]


def scheduler(
    engines: list[EchoEngine],
    *graders: ExactGrader,
    finished: Finished | None = None,
    group_filter: GroupFilter | None = None,
) -> RolloutScheduler:
    return RolloutScheduler(
        RolloutConfig(num_groups=4, group_size=3, max_new_tokens=8, filter=group_filter),
        seed=0,
        source=ArithmeticSource(ArithmeticProblems(digits=4), seed=0),
        renderer=CharacterRenderer(),
        engines=engines,
        graders=graders or [ExactGrader()],
        finished=finished,
    )


def test_every_attempt_comes_back_once_in_order_whatever_order_it_finished_in():
    trajectories = asyncio.run(scheduler([EchoEngine("a"), EchoEngine("b")]).collect(REQUEST, 5.0)).trajectories
    assert [(t.group, t.attempt) for t in trajectories] == [(g, a) for g in range(4) for a in range(3)]
    source = ArithmeticSource(ArithmeticProblems(digits=4), seed=0)
    assert [t.problem_id for t in trajectories[::3]] == [source.problem(10 + g).problem_id for g in range(4)]


def test_groups_stay_whole_on_an_engine_and_every_attempt_has_its_own_seed():
    engines = [EchoEngine("a"), EchoEngine("b")]
    asyncio.run(scheduler(engines).collect(REQUEST, 5.0))
    groups = [{request.request_id.split("/")[0] for request in engine.seen} for engine in engines]
    assert groups == [{"10", "12"}, {"11", "13"}]
    assert len({request.seed for engine in engines for request in engine.seen}) == 12


def test_a_grader_that_fails_costs_that_trajectory_only():
    trajectories = asyncio.run(
        scheduler([EchoEngine("a")], ExactGrader(failing_attempt=1)).collect(REQUEST, 5.0)
    ).trajectories
    failed = [t for t in trajectories if t.failure]
    assert [t.attempt for t in failed] == [1, 1, 1, 1]
    assert all(t.score is None for t in failed)
    assert batch_metrics(trajectories, 3)["rollout/failed"] == 4.0
    assert batch_metrics(trajectories, 3)["reward/mean"] == 0.5


def test_a_filter_of_the_users_decides_which_groups_are_trained_on(their_module):
    their_module("asked = []\ndef every_other(rewards):\n    asked.append(rewards)\n    return len(asked) % 2 == 0\n")
    keep = GroupFilter(predicate="their_filters:every_other")
    batch = asyncio.run(scheduler([EchoEngine("a")], group_filter=keep).collect(REQUEST, 5.0))
    outcomes = batch.draws.outcomes
    assert sorted(outcomes) == sorted("tf" * 4)
    assert [t.group for t in batch.trajectories[::3]] == [place for place, letter in enumerate(outcomes) if letter == "t"]
    assert importlib.import_module("their_filters").asked == [[0.5] * 3] * 8


def test_a_filter_of_the_users_that_raises_ends_the_stage_with_its_name_and_the_rewards(their_module):
    their_module("def broken(rewards):\n    return rewards[7]\n")
    failing = scheduler([EchoEngine("a")], group_filter=GroupFilter(predicate="their_filters:broken"))
    with pytest.raises(
        RollError, match=r"predicate: their_filters:broken failed for the rewards \[0.5, 0.5, 0.5\]: IndexError"
    ):
        asyncio.run(failing.collect(REQUEST, 5.0))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("their_filters.keep", "'their_filters.keep' must be written like package.module:function"),
        ("no_such_module:keep", "no_such_module cannot be imported .* put its folder on PYTHONPATH"),
        ("their_filters:absent", "their_filters has no function 'absent'"),
        ("their_filters:number", "their_filters has no function 'number'"),
    ],
)
def test_a_filter_of_the_users_that_cannot_be_found_is_one_sentence(their_module, name, says):
    their_module("number = 1\n")
    with pytest.raises(UserError, match=f"^rollout.filter.predicate: {says}"):
        build_filter(GroupFilter(predicate=name))


@pytest.fixture
def their_module(tmp_path, monkeypatch) -> Iterator[Callable[[str], object]]:
    """Write a module as a user would bring it."""
    monkeypatch.syspath_prepend(tmp_path)
    yield (tmp_path / "their_filters.py").write_text
    sys.modules.pop("their_filters", None)


def test_a_deadline_names_the_engine_that_is_late():
    engines = [EchoEngine("engine 0"), EchoEngine("engine 1", stuck=2)]
    with pytest.raises(DeadlineExceeded, match=r"deadlines.collect: .* still waiting for engine 1 \(2 of 12 attempts\)"):
        asyncio.run(scheduler(engines).collect(REQUEST, 0.2))


# -------------------------------------------------------------------------------------------------- what failed is not lost
@dataclass
class DyingEngine(EchoEngine):
    """Dies after some completions, while the other engines are still at work."""

    completes: int = 2

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        left = self.completes
        async for completions in super().generate(requests):
            if not left:
                raise RoleDied(f"{self.name} died while generating")
            left -= 1
            yield completions


class AbsentGrader(ExactGrader):
    """Grades as many trajectories as it is told to; then its service is away."""

    def __init__(self, grades: int = 0):
        super().__init__()
        self._grades = grades

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure | RewardUnavailable]:
        graded = await super().grade(items[: self._grades])
        self._grades -= len(graded)
        return graded + [RewardUnavailable("judge: 503")] * (len(items) - len(graded))


def uninterrupted() -> bytes:
    return encode_trajectories(asyncio.run(scheduler([EchoEngine("a")]).collect(REQUEST, 5.0)).trajectories)


def journal() -> Journal:
    """In a store of its own."""
    return Journal(ObjectStore(f"memory://{uuid.uuid4().hex}"), "run-1", seconds=0.0)


def fail(kept: Journal, failing: RolloutScheduler, error: type[Exception], deadline_s: float = 5.0) -> None:
    """A collect that fails, as the scheduler's role would see it."""

    async def collect() -> None:
        with pytest.raises(error):
            await failing.collect(REQUEST, deadline_s)
        await kept.keep(failing.finished.values())

    asyncio.run(collect())


def collect_again(kept: Journal, grader: ExactGrader | None = None) -> tuple[bytes, int]:
    """The bytes the next collect of the request leads to, and how many attempts it generated for them."""
    engine = EchoEngine("again")
    again = scheduler([engine], *([grader] if grader else []), finished=kept.read())
    return encode_trajectories(asyncio.run(again.collect(REQUEST, 5.0)).trajectories), len(engine.seen)


def test_a_reward_that_went_away_costs_no_generation():
    fail(kept := journal(), scheduler([EchoEngine("a"), EchoEngine("b")], AbsentGrader(grades=5)), RewardUnavailable)
    grader = AbsentGrader(grades=7)  # what is left
    assert collect_again(kept, grader) == (uninterrupted(), 0)


def test_grades_that_were_given_are_not_asked_for_again():
    fail(kept := journal(), scheduler([EchoEngine("a")], AbsentGrader(grades=5)), RewardUnavailable)
    assert sum(t.score is not None for t in kept.read().values()) == 5
    assert len(kept.read()) == 12


def test_an_engine_that_died_is_replaced_by_the_others_and_nothing_changes_by_that():
    """Two of its six attempts were finished; the other engine makes the rest beside its own."""
    other = EchoEngine("b")
    trajectories = asyncio.run(scheduler([DyingEngine("a"), other]).collect(REQUEST, 5.0)).trajectories
    assert encode_trajectories(trajectories) == uninterrupted()
    assert len(other.seen) == 6 + 4


def test_the_last_engine_to_die_costs_only_what_it_had_not_finished():
    """Two of the six attempts of the first, two of the ten that the second then had."""
    both = scheduler([DyingEngine("a"), DyingEngine("b")])
    with pytest.raises(RoleDied, match="a died while generating; b died while generating; none is left"):
        asyncio.run(both.collect(REQUEST, 5.0))
    again = EchoEngine("again")
    rollout = asyncio.run(scheduler([again], finished=both.finished).collect(REQUEST, 5.0))
    assert (encode_trajectories(rollout.trajectories), len(again.seen)) == (uninterrupted(), 8)


def test_the_dead_stay_dead_for_later_stages():
    dying, other = DyingEngine("a"), EchoEngine("b")
    both = scheduler([dying, other])

    async def collect_then_evaluate() -> None:
        await both.collect(REQUEST, 5.0)
        await both.evaluate(6, 5.0)

    asyncio.run(collect_then_evaluate())
    assert (len(dying.seen), len(other.seen)) == (6, 10 + 6)


class DyingGrader(ExactGrader):
    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure]:
        raise RoleDied(f"{self.name} died while grading")


def test_what_a_dead_grader_had_is_graded_by_the_others():
    dying = DyingGrader()
    dying.name = "dying grader"
    batch = asyncio.run(scheduler([EchoEngine("a")], dying, ExactGrader()).collect(REQUEST, 5.0))
    assert encode_trajectories(batch.trajectories) == uninterrupted()
    with pytest.raises(RoleDied, match="dying grader died while grading"):
        asyncio.run(scheduler([EchoEngine("a")], dying).collect(REQUEST, 5.0))


def test_a_deadline_costs_only_what_was_not_finished():
    fail(kept := journal(), scheduler([EchoEngine("a", stuck=3)]), DeadlineExceeded, deadline_s=0.2)
    assert collect_again(kept) == (uninterrupted(), 3)


def keep(kept: Journal, *trajectories: Trajectory) -> None:
    asyncio.run(kept.keep(trajectories))


def test_failed_grades_are_tried_again_and_aborted_attempts_made_again():
    kept = journal()
    aborted = replace(trajectory(0, 1, None), ending=Ending.ABORTED, failure=Failure("generate", "aborted"))
    keep(kept, trajectory(0, 0, None), aborted, trajectory(0, 2, 0.5))
    assert kept.read() == {(0, 0): replace(trajectory(0, 0, None), failure=None), (0, 2): trajectory(0, 2, 0.5)}


def test_of_what_was_kept_twice_the_graded_one_counts():
    kept = journal()
    for score in (0.5, None):
        keep(kept, replace(trajectory(4, 0, score), failure=None))
    assert kept.read() == {(4, 0): trajectory(4, 0, 0.5)}


def test_what_is_added_is_kept_within_some_seconds_unless_a_batch_has_it_by_then():
    async def add(kept: Journal) -> None:
        for number in (3, 4):
            kept.add(trajectory(number, 0, 0.5))
        kept.drop_before(4)
        while not kept.read():
            await asyncio.sleep(0)

    asyncio.run(add(kept := journal()))
    assert set(kept.read()) == {(4, 0)}


def test_what_a_committed_iteration_used_up_is_forgotten():
    kept = journal()
    keep(kept, trajectory(3, 0, 0.5), trajectory(4, 0, 0.5))
    keep(kept, trajectory(5, 0, 0.5))
    kept.forget_before(5)
    assert set(kept.read()) == {(5, 0)}


def test_what_is_kept_is_used_only_by_weights_that_may_have_made_it():
    """The engine's tokens are of version 3, as the request's; those of a version that was never committed are made again."""
    fail(kept := journal(), scheduler([EchoEngine("a")], AbsentGrader()), RewardUnavailable)
    for version in (2, 4):
        engine = EchoEngine("again")
        again = scheduler([engine], finished=kept.read())
        asyncio.run(again.collect(REQUEST.model_copy(update={"weights_version": version}), 5.0))
        assert len(engine.seen) == 12


def test_what_was_graded_in_one_call_has_the_same_times_in_the_trace():
    """By the clock of the world, which goes on between two answers: a fit tells calls apart by their times."""
    trace = asyncio.run(scheduler([EchoEngine("a")]).collect(REQUEST, 5.0)).trace
    assert len(trace) == 12
    assert len({(attempt.grading_at, attempt.graded_at) for attempt in trace}) == 1


def test_a_new_leg_forgets_what_was_made_by_weights_that_were_never_committed():
    """The engine's tokens are of version 3."""
    fail(kept := journal(), scheduler([EchoEngine("a")], AbsentGrader()), RewardUnavailable)
    leg = scheduler([EchoEngine("b")], finished=kept.read())
    assert (leg.drop_newer_than(3), leg.drop_newer_than(2), leg.finished) == (0, 12, {})
    asyncio.run(kept.rewrite(leg.finished.values()))
    assert kept.read() == {}


def test_what_is_generated_is_kept_before_it_is_graded():
    kept: list[Trajectory] = []
    whole = scheduler([EchoEngine("a")])
    whole._keep = kept.append
    asyncio.run(whole.collect(REQUEST, 5.0))
    assert [t.score is None for t in kept] == [True] * 12 + [False] * 12


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:80] + b"?" + data[81:], lambda data: b""])
def test_a_damaged_part_is_as_good_as_none(tmp_path, damage):
    kept = Journal(ObjectStore(f"file://{tmp_path}"), "run-1", seconds=0.0)
    fail(kept, scheduler([EchoEngine("a")], AbsentGrader()), RewardUnavailable)
    (file,) = (tmp_path / "runs/run-1/unfinished").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert collect_again(kept) == (uninterrupted(), 12)


def test_a_store_that_cannot_be_written_does_not_hide_what_failed(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    fail(Journal(ObjectStore(f"file://{tmp_path}"), "run-1", 0.0), scheduler([DyingEngine("a")]), RoleDied)


def test_evaluation_is_one_greedy_attempt_at_each_held_out_problem():
    engine = EchoEngine("a")
    trajectories = asyncio.run(scheduler([engine]).evaluate(6, 5.0))
    assert len(trajectories) == 6
    assert {request.temperature for request in engine.seen} == {0.0}
    assert all("held-out" in t.problem_id for t in trajectories)


def test_metrics_of_a_batch_by_hand():
    batch = [
        trajectory(0, 0, 1.0),
        trajectory(0, 1, 0.0),
        trajectory(1, 0, 0.5, completion=5),
        trajectory(1, 1, 0.5),
        trajectory(2, 0, None),
    ]
    found = batch_metrics(batch, weights_version=2)
    assert found["reward/mean"] == 0.5
    assert found["accuracy/train"] == 0.25
    assert found["reward/informative_groups"] == 0.5  # group 0 differs, group 1 does not
    assert found["response/mean_tokens"] == 3.5
    assert found["rollout/staleness_max"] == 2.0
    assert found["rollout/failed"] == 1.0
    assert found["problem/quarantined"] == 1.0  # nobody could grade group 2
    assert accuracy(batch) == 0.25  # of the four that were graded


def test_staleness_is_told_by_share_of_tokens_and_lengths_by_their_tail():
    batch = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0, completion=5)]
    versions = (2, 2, 1, 0, 0)
    batch[1] = replace(batch[1], turns=(replace(batch[1].turns[0], weights_versions=versions),))
    batch[0] = replace(batch[0], turns=(replace(batch[0].turns[0], weights_versions=(2, 2, 2)),))
    found = batch_metrics(batch, weights_version=2)
    assert (found["rollout/tokens_0_stale"], found["rollout/tokens_1_stale"], found["rollout/tokens_2_stale"]) == (
        *(5 / 8, 1 / 8, 2 / 8),
    )
    assert found["rollout/staleness_mean"] == 5 / 8
    assert (found["response/p50_tokens"], found["response/p99_tokens"]) == (5.0, 5.0)


def test_a_meter_tells_mean_peak_and_share_of_the_time_since_it_was_read():
    meter = Meter(now=0.0)
    meter.set(4, now=1.0)
    meter.set(1, now=2.0)
    assert meter.read(now=4.0) == MeterReading(mean=1.5, peak=4.0, busy_share=0.75)
    meter.set(0, now=5.0)
    assert meter.read(now=8.0) == MeterReading(mean=0.25, peak=1.0, busy_share=0.25)


def test_an_unknown_character_is_refused_not_dropped():
    with pytest.raises(ValueError, match="no token for"):
        characters.encode("naïve")
    assert characters.decode(characters.encode("Sort 40213>")) == "Sort 40213>"
