"""Trajectories as Parquet, problems by seed, rewards, journal, and the rollout scheduler with fake engines and graders."""

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
from roll_core.rollout.router import Grade, GradingItem
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


def test_more_held_out_problems_than_exist_are_refused_in_one_sentence():
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
    ("text", "message"), [('{"prompt": "a"}', "line 1 of"), ("nonsense", "line 1 of"), ("", "holds no problems")]
)
def test_a_bad_jsonl_file_is_refused_in_one_sentence(tmp_path, text, message):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(UserError, match=f"problems.train: .*{message}|problems.train: {message}"):
        JsonlSource(JsonlProblems(train=str(tmp_path / "t.jsonl"), held_out="x"), seed=0)


def test_derived_seeds_differ_by_purpose_and_index_and_are_stable():
    assert derive_seed(0, "collect", 4, 2) == derive_seed(0, "collect", 4, 2)
    assert len({derive_seed(0, "collect", i, j) for i in range(50) for j in range(50)}) == 2500
    assert derive_seed(0, "a") != derive_seed(1, "a")


# -------------------------------------------------------------------------------------------------- rewards
def grade(reward, text: str, answer: str) -> Score:
    """Grade a trajectory whose text is `text`, for a problem with this expected answer."""
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
    """Engine that returns prompts as completions, in reverse order; its first `stuck` requests end only when aborted."""

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
    """Grader like the reward role, except that it fails on attempt number `failing_attempt` of each group."""

    def __init__(self, failing_attempt: int | None = None):
        self.name = "grader"
        self._failing = failing_attempt

    async def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]:
        yield [(index, self.grade_one(*item)) for index, item in enumerate(items)]

    def grade_one(self, problem: Problem, t: Trajectory) -> Grade:
        if t.attempt == self._failing:
            return Failure("grade", "boom")
        return Score(0.5, problem.answer == t.turns[-1].text)


def scheduler(
    engines: list[EchoEngine],
    *graders: ExactGrader,
    finished: Finished | None = None,
    group_filter: GroupFilter | None = None,
) -> RolloutScheduler:
    return RolloutScheduler(
        RolloutConfig(num_groups=4, group_size=3, max_new_tokens=8, filter=group_filter),
        seed=0,
        max_positions=32,
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


def test_a_filter_of_the_user_decides_which_groups_are_trained_on(their_module):
    their_module("asked = []\ndef every_other(rewards):\n    asked.append(rewards)\n    return len(asked) % 2 == 0\n")
    keep = GroupFilter(predicate="their_filters:every_other")
    batch = asyncio.run(scheduler([EchoEngine("a")], group_filter=keep).collect(REQUEST, 5.0))
    outcomes = batch.draws.outcomes
    assert sorted(outcomes) == sorted("tf" * 4)
    assert [t.group for t in batch.trajectories[::3]] == [group for group, letter in enumerate(outcomes) if letter == "t"]
    assert importlib.import_module("their_filters").asked == [[0.5] * 3] * 8


def test_a_filter_of_the_user_that_raises_ends_the_stage_with_its_name_and_the_rewards(their_module):
    their_module("def broken(rewards):\n    return rewards[7]\n")
    failing = scheduler([EchoEngine("a")], group_filter=GroupFilter(predicate="their_filters:broken"))
    with pytest.raises(
        RollError, match=r"predicate: their_filters:broken failed for the rewards \[0.5, 0.5, 0.5\]: IndexError"
    ):
        asyncio.run(failing.collect(REQUEST, 5.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("their_filters.keep", "'their_filters.keep' must be written like package.module:function"),
        ("no_such_module:keep", "no_such_module cannot be imported .* put its folder on PYTHONPATH"),
        ("their_filters:absent", "their_filters has no function 'absent'"),
        ("their_filters:number", "their_filters has no function 'number'"),
    ],
)
def test_a_filter_of_the_user_that_cannot_be_found_is_refused_in_one_sentence(their_module, name, message):
    their_module("number = 1\n")
    with pytest.raises(UserError, match=f"^rollout.filter.predicate: {message}"):
        build_filter(GroupFilter(predicate=name))


@pytest.fixture
def their_module(tmp_path, monkeypatch) -> Iterator[Callable[[str], object]]:
    """Function that writes the module `their_filters`, as a user would bring it."""
    monkeypatch.syspath_prepend(tmp_path)
    yield (tmp_path / "their_filters.py").write_text
    sys.modules.pop("their_filters", None)


def test_a_deadline_names_the_engine_that_is_late():
    engines = [EchoEngine("engine 0"), EchoEngine("engine 1", stuck=2)]
    with pytest.raises(DeadlineExceeded, match=r"deadlines.collect: .* still waiting for engine 1 \(2 of 12 attempts\)"):
        asyncio.run(scheduler(engines).collect(REQUEST, 0.2))


# -------------------------------------------------------------------------------------------------- after a failed collect
@dataclass
class DyingEngine(EchoEngine):
    """Engine that dies after `completes` completions, while the other engines still generate."""

    completes: int = 2

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        left = self.completes
        async for completions in super().generate(requests):
            if not left:
                raise RoleDied(f"{self.name} died while generating")
            left -= 1
            yield completions


class OutageGrader(ExactGrader):
    """Grader whose service is unavailable after `grades` trajectories."""

    def __init__(self, grades: int = 0):
        super().__init__()
        self._grades = grades

    def grade_one(self, problem: Problem, t: Trajectory) -> Grade:
        self._grades -= 1
        return RewardUnavailable("judge: 503") if self._grades < 0 else super().grade_one(problem, t)


def uninterrupted() -> bytes:
    """Trajectories of a collect in which nothing fails, as Parquet."""
    return encode_trajectories(asyncio.run(scheduler([EchoEngine("a")]).collect(REQUEST, 5.0)).trajectories)


def journal() -> Journal:
    """Empty journal in a store of its own."""
    return Journal(ObjectStore(f"memory://{uuid.uuid4().hex}"), "run-1", seconds=0.0)


def fail_collect(kept: Journal, failing: RolloutScheduler, error: type[Exception], deadline_s: float = 5.0) -> None:
    """Run a collect that must fail, then write its finished trajectories to the journal, as the scheduler's role does."""

    async def collect() -> None:
        with pytest.raises(error):
            await failing.collect(REQUEST, deadline_s)
        await kept.keep(failing.finished.values())

    asyncio.run(collect())


def collect_again(kept: Journal, grader: ExactGrader | None = None) -> tuple[bytes, int]:
    """Collect the request again; return its trajectories as Parquet and the number of attempts it generated."""
    engine = EchoEngine("again")
    again = scheduler([engine], *([grader] if grader else []), finished=kept.read())
    return encode_trajectories(asyncio.run(again.collect(REQUEST, 5.0)).trajectories), len(engine.seen)


def test_an_unavailable_reward_costs_no_generation():
    fail_collect(kept := journal(), scheduler([EchoEngine("a"), EchoEngine("b")], OutageGrader(grades=5)), RewardUnavailable)
    grader = OutageGrader(grades=7)  # the remaining trajectories
    assert collect_again(kept, grader) == (uninterrupted(), 0)


def test_grades_from_before_a_failure_are_kept():
    fail_collect(kept := journal(), scheduler([EchoEngine("a")], OutageGrader(grades=5)), RewardUnavailable)
    assert sum(t.score is not None for t in kept.read().values()) == 5
    assert len(kept.read()) == 12


def test_other_engines_take_the_attempts_of_a_dead_one_and_the_result_is_the_same():
    """The dead engine finished two of its six attempts. The other engine generates the rest beside its own."""
    other = EchoEngine("b")
    trajectories = asyncio.run(scheduler([DyingEngine("a"), other]).collect(REQUEST, 5.0)).trajectories
    assert encode_trajectories(trajectories) == uninterrupted()
    assert len(other.seen) == 6 + 4


def test_the_death_of_the_last_engine_costs_only_unfinished_attempts():
    """The first engine finishes two of its six attempts, the second two of the ten that it then has."""
    both = scheduler([DyingEngine("a"), DyingEngine("b")])
    with pytest.raises(RoleDied, match="a died while generating; b died while generating; none is left"):
        asyncio.run(both.collect(REQUEST, 5.0))
    again = EchoEngine("again")
    rollout = asyncio.run(scheduler([again], finished=both.finished).collect(REQUEST, 5.0))
    assert (encode_trajectories(rollout.trajectories), len(again.seen)) == (uninterrupted(), 8)


def test_a_dead_engine_gets_no_requests_in_later_stages():
    dying, other = DyingEngine("a"), EchoEngine("b")
    both = scheduler([dying, other])

    async def collect_then_evaluate() -> None:
        await both.collect(REQUEST, 5.0)
        await both.evaluate(6, 5.0)

    asyncio.run(collect_then_evaluate())
    assert (len(dying.seen), len(other.seen)) == (6, 10 + 6)


class DyingGrader(ExactGrader):
    def grade_one(self, problem: Problem, t: Trajectory) -> Grade:
        raise RoleDied(f"{self.name} died while grading")


def test_the_trajectories_of_a_dead_grader_are_graded_by_the_others():
    dying = DyingGrader()
    dying.name = "dying grader"
    batch = asyncio.run(scheduler([EchoEngine("a")], dying, ExactGrader()).collect(REQUEST, 5.0))
    assert encode_trajectories(batch.trajectories) == uninterrupted()
    with pytest.raises(RoleDied, match="dying grader died while grading"):
        asyncio.run(scheduler([EchoEngine("a")], dying).collect(REQUEST, 5.0))


def test_a_missed_deadline_costs_only_unfinished_attempts():
    fail_collect(kept := journal(), scheduler([EchoEngine("a", stuck=3)]), DeadlineExceeded, deadline_s=0.2)
    assert collect_again(kept) == (uninterrupted(), 3)


def keep(kept: Journal, *trajectories: Trajectory) -> None:
    """Write trajectories to the journal."""
    asyncio.run(kept.keep(trajectories))


def test_the_journal_keeps_failed_grades_as_ungraded_and_drops_aborted_attempts():
    kept = journal()
    aborted = replace(trajectory(0, 1, None), ending=Ending.ABORTED, failure=Failure("generate", "aborted"))
    keep(kept, trajectory(0, 0, None), aborted, trajectory(0, 2, 0.5))
    assert kept.read() == {(0, 0): replace(trajectory(0, 0, None), failure=None), (0, 2): trajectory(0, 2, 0.5)}


def test_if_the_journal_has_an_attempt_twice_the_graded_one_counts():
    kept = journal()
    for score in (0.5, None):
        keep(kept, replace(trajectory(4, 0, score), failure=None))
    assert kept.read() == {(4, 0): trajectory(4, 0, 0.5)}


def test_an_added_trajectory_is_journaled_within_some_seconds_unless_a_batch_has_it_by_then():
    async def add(kept: Journal) -> None:
        for number in (3, 4):
            kept.add(trajectory(number, 0, 0.5))
        kept.drop_before(4)
        while not kept.read():
            await asyncio.sleep(0)

    asyncio.run(add(kept := journal()))
    assert set(kept.read()) == {(4, 0)}


def test_the_journal_forgets_trajectories_that_a_committed_iteration_used():
    kept = journal()
    keep(kept, trajectory(3, 0, 0.5), trajectory(4, 0, 0.5))
    keep(kept, trajectory(5, 0, 0.5))
    kept.forget_before(5)
    assert set(kept.read()) == {(5, 0)}


def test_journaled_trajectories_are_used_only_with_weights_that_may_have_generated_them():
    """The engine's tokens are of version 3, like the request's. For other versions all attempts are generated again."""
    fail_collect(kept := journal(), scheduler([EchoEngine("a")], OutageGrader()), RewardUnavailable)
    for version in (2, 4):
        engine = EchoEngine("again")
        again = scheduler([engine], finished=kept.read())
        asyncio.run(again.collect(REQUEST.model_copy(update={"weights_version": version}), 5.0))
        assert len(engine.seen) == 12


def test_attempts_that_were_graded_in_one_call_have_the_same_times_in_the_trace():
    """The simulator's fit tells calls of a grader apart by their times, and the wall clock advances between two results."""
    trace = asyncio.run(scheduler([EchoEngine("a")]).collect(REQUEST, 5.0)).trace
    assert len(trace) == 12
    assert len({(attempt.grading_at, attempt.graded_at) for attempt in trace}) == 1


def test_a_new_leg_drops_trajectories_of_weights_that_were_never_committed():
    """The tokens of the engine are of version 3."""
    fail_collect(kept := journal(), scheduler([EchoEngine("a")], OutageGrader()), RewardUnavailable)
    leg = scheduler([EchoEngine("b")], finished=kept.read())
    assert (leg.drop_newer_than(3), leg.drop_newer_than(2), leg.finished) == (0, 12, {})
    asyncio.run(kept.rewrite(leg.finished.values()))
    assert kept.read() == {}


def test_a_trajectory_is_journaled_before_it_is_graded():
    kept: list[Trajectory] = []
    whole = scheduler([EchoEngine("a")])
    whole._keep = kept.append
    asyncio.run(whole.collect(REQUEST, 5.0))
    assert [t.score is None for t in kept] == [True] * 12 + [False] * 12


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:80] + b"?" + data[81:], lambda data: b""])
def test_a_damaged_part_of_the_journal_is_ignored(tmp_path, damage):
    kept = Journal(ObjectStore(f"file://{tmp_path}"), "run-1", seconds=0.0)
    fail_collect(kept, scheduler([EchoEngine("a")], OutageGrader()), RewardUnavailable)
    (file,) = (tmp_path / "runs/run-1/unfinished").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert collect_again(kept) == (uninterrupted(), 12)


def test_an_unwritable_store_does_not_hide_the_failure(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    fail_collect(Journal(ObjectStore(f"file://{tmp_path}"), "run-1", 0.0), scheduler([DyingEngine("a")]), RoleDied)


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
    assert found["problem/quarantined"] == 1.0  # group 2 has no grade
    assert accuracy(batch) == 0.2  # one of five: an evaluation counts a failed grade as wrong


def test_staleness_is_reported_by_share_of_tokens_and_lengths_by_percentiles():
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


def test_a_meter_reports_mean_peak_and_busy_share_since_it_was_read():
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
