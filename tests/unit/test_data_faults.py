"""Faults of single samples cost these samples and never a run: prompts that cannot be posed, rewards that never return,
answers that kill their reward worker."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from rich.console import Console

from flows.cli.progress_view import IDLE_NOTE_EVERY, RunView
from roll_core.concurrency import as_they_finish
from roll_core.config.rollout import GroupFilter, RolloutConfig
from roll_core.errors import DeadlineExceeded, RoleDied, RollError, UserError
from roll_core.planning.preflight import check_prompts
from roll_core.roles.reward_role import RewardRole
from roll_core.roles.scheduler_role import SchedulerRole
from roll_core.rollout.journal import Journal
from roll_core.rollout.metrics import accuracy
from roll_core.rollout.posing import render_demonstration
from roll_core.rollout.renderer import CharacterRenderer
from roll_core.rollout.router import MAX_GRADER_DEATHS, Grade, GradingItem
from roll_core.rollout.scheduler import Rollout, RolloutScheduler
from roll_core.rollout.stream import Finished
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import decode_trajectories, encode_trajectories
from roll_core.types.manifest import CollectRequest
from roll_core.types.refs import RunRef
from roll_core.types.trajectory import Demonstration, Ending, Failure, Message, Problem, Score, Speaker, Trajectory
from tests.stored_runs import bare_manifest
from tests.support import grades_of, tiny_config, trajectory
from tests.unit.test_rollouts import EchoEngine, ExactGrader

REQUEST = CollectRequest(iteration=1, parent="p" * 64, weights_version=3, first_problem=0, num_groups=4)
LONG = "1" * 30
"""Prompt that leaves no room for a completion: 30 tokens, of 24 allowed."""


@dataclass(frozen=True)
class Prompts:
    """Problem source with these prompts, in turn."""

    texts: Sequence[str]
    domains = frozenset({"given"})

    def problem(self, index: int) -> Problem:
        text = self.texts[index % len(self.texts)]
        return Problem(f"given/{index}", "given", (Message(Speaker.USER, text),), text[:-1])

    def held_out(self, count: int) -> list[Problem]:
        return [self.problem(index) for index in range(count)]

    def demonstration(self, index: int) -> Demonstration:
        return Demonstration(self.problem(index), "1")


class StrictTemplate(CharacterRenderer):
    """Renderer whose template refuses what is not a number, with an exception of its own."""

    class TemplateError(Exception):
        pass

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        if "z" in messages[0].text:
            raise self.TemplateError("roles must alternate")
        return super().prompt(messages)


def scheduler(
    texts: Sequence[str],
    *graders: ExactGrader,
    engine: EchoEngine | None = None,
    finished: Finished | None = None,
    **rollout: object,
) -> RolloutScheduler:
    return RolloutScheduler(
        RolloutConfig(num_groups=4, group_size=2, max_new_tokens=8, **rollout),
        seed=0,
        max_positions=32,
        source=Prompts(texts),
        renderer=StrictTemplate(),
        engines=[engine or EchoEngine("engine 0")],
        graders=graders or [ExactGrader()],
        finished=finished,
    )


def collect(*args: object, **kwargs: object) -> Rollout:
    return asyncio.run(scheduler(*args, **kwargs).collect(REQUEST, 60.0))


# -------------------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize("group_filter", [None, GroupFilter(min_mean=0.1)])
@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (LONG, "problem given/1: prompt too long: 30 tokens of 24 allowed (model.max_positions 32 less"),
        ("z3", "problem given/1 cannot be rendered: TemplateError: roles must alternate"),
        ("é", "problem given/1 cannot be rendered: ValueError"),
        ("", "problem given/1 has an empty prompt"),
    ],
)
def test_a_prompt_that_cannot_be_posed_costs_its_problem_and_is_replaced(bad, cause, group_filter, caplog):
    engine = EchoEngine("engine 0")
    rollout = collect(["123", bad, "456", "789", "321"], engine=engine, filter=group_filter)
    assert rollout.draws.outcomes == "txttt"
    assert [(t.group, t.attempt) for t in rollout.trajectories] == [(g, a) for g in (0, 2, 3, 4) for a in range(2)]
    assert rollout.metrics["rollout/failed_groups"] == 1.0
    assert rollout.metrics["rollout/wasted_tokens"] == 0.0
    assert "1/0" not in {request.request_id for request in engine.seen}
    assert cause in caplog.text


def test_after_a_failed_collect_the_same_prompts_are_left_out_and_the_batch_is_the_same():
    texts = ["123", LONG, "456", "z3", "789", "321"]
    journal = Journal(ObjectStore("memory://data-faults"), "run-1", seconds=0.0)
    failing = scheduler(texts, engine=EchoEngine("engine 0", stuck=2))

    async def fail_and_keep() -> None:
        with pytest.raises(DeadlineExceeded):
            await failing.collect(REQUEST, 0.5)
        await journal.keep(failing.finished.values())

    asyncio.run(fail_and_keep())
    again, unbroken = collect(texts, finished=journal.read()), collect(texts)
    assert again.draws == unbroken.draws
    assert again.draws.outcomes == "txtxtt"
    assert encode_trajectories(again.trajectories) == encode_trajectories(unbroken.trajectories)


@pytest.mark.parametrize("group_filter", [None, GroupFilter(min_mean=0.1)])
def test_if_no_problem_can_be_posed_the_stage_ends_with_one_sentence(group_filter):
    with pytest.raises(RollError) as refused:
        collect([LONG], filter=group_filter)
    assert str(refused.value) == (
        "rollout.max_draws: of 32 problems drawn only 0 were useful, and 4 are needed (32 could not be posed): the first "
        "was problem given/0: prompt too long: 30 tokens of 24 allowed (model.max_positions 32 less rollout.max_new_tokens "
        "8): make these prompts shorter, or make room for them"
    )


def test_a_held_out_prompt_that_is_too_long_counts_as_wrong():
    trajectories = asyncio.run(scheduler(["123", LONG, "456", "z3"]).evaluate(4, 60.0))
    assert [t.ending for t in trajectories] == [Ending.STOP, Ending.UNPOSED, Ending.STOP, Ending.UNPOSED]
    assert [t.failure is not None for t in trajectories] == [False, True, False, True]
    assert decode_trajectories(encode_trajectories(trajectories[1:2])) == trajectories[1:2]
    assert accuracy(trajectories) == 0.5


def test_held_out_accuracy_counts_failed_grades_as_wrong_and_is_the_same_without_any():
    graded = [trajectory(0, 0, 1.0), trajectory(1, 0, 0.0)]
    assert accuracy(graded) == 0.5
    assert accuracy([*graded, trajectory(2, 0, None), trajectory(3, 0, None)]) == 0.25


def test_before_a_start_only_problems_of_which_none_can_be_posed_are_refused(tmp_path, caplog):
    def config(text: str):
        rows, train = tmp_path / "rows.jsonl", tmp_path / "train.jsonl"
        rows.write_text("".join(f'{{"prompt": "{row}", "answer": "1"}}\n' for row in ("12", text)))
        train.write_text('{"prompt": "34", "answer": "1"}\n')
        problems = {"kind": "jsonl", "train": str(train), "held_out": str(rows)}
        return tiny_config(tmp_path, problems=problems, evaluation={"num_problems": 2})

    check_prompts(config(LONG))
    assert "problems: 1 of 2 held-out problems cannot be posed, the first: problem rows/2: prompt too long" in caplog.text
    with pytest.raises(UserError, match="problems: none of 2 held-out problems can be posed: problem rows/"):
        check_prompts(config("12").model_copy(update={"model": config("12").model.model_copy(update={"max_positions": 6})}))


def test_a_demonstration_that_cannot_be_rendered_is_left_out(caplog):
    good, bad = (Demonstration(Prompts([text]).problem(0), "1") for text in ("12", "z"))
    assert render_demonstration(good, StrictTemplate()) is not None
    assert render_demonstration(bad, StrictTemplate()) is None
    assert "the demonstration of problem given/0 is left out: TemplateError: roles must alternate" in caplog.text


def test_requests_beside_one_that_fails_are_cancelled():
    cancelled = []

    async def generate(number: int) -> int:
        if number == 1:
            raise ValueError("no such token")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    async def consume() -> None:
        with pytest.raises(ValueError, match="no such token"):
            async for _ in as_they_finish(generate(number) for number in range(3)):
                pass
        await asyncio.sleep(0)

    asyncio.run(consume())
    assert cancelled == [0, 2]


@pytest.mark.parametrize("kind", ["grpo", "reinforce_plus_plus"])
def test_the_terminal_says_once_that_nothing_is_learned_and_repeats_it_seldom(tmp_path, kind):
    console = Console(file=io.StringIO(), width=400)
    view = RunView(tiny_config(tmp_path, algorithm={"kind": kind}), console)
    for iteration, informative in enumerate([0.0, 1.0] + [0.0] * (IDLE_NOTE_EVERY + 1)):
        metrics = {"reward/informative_groups": informative, "reward/mean": 0.0, "accuracy/train": 0.0}
        view._print_row(
            bare_manifest(iteration, metrics=metrics, timings={"wall": 1.0}, committed_at="2026-01-01T00:00:00+00:00")
        )
    said = [line for line in console.file.getvalue().splitlines() if "nothing is learned" in line]
    assert [line.split(":")[0] for line in said] == [
        f"nothing is learned in iteration {iteration}"
        for iteration in ((0, 2, 2 + IDLE_NOTE_EVERY) if kind == "grpo" else ())
    ]
    assert all("choose easier problems, give partial credit, or raise rollout.group_size" in line for line in said)


# -------------------------------------------------------------------------------------------------- rewards that hang
ITEMS: list[GradingItem] = [
    (Problem(f"p/{number}", "p", (Message(Speaker.USER, "?"),), "42"), trajectory(number, 0, None)) for number in range(4)
]


def role(tmp_path, **reward: object) -> RewardRole:
    return RewardRole(tiny_config(tmp_path, reward={"kind": "exact_match", **reward}))


def test_a_reward_that_never_returns_is_named_and_counted_and_holds_no_sibling(tmp_path):
    worker = role(tmp_path, deadline_seconds=0.2)
    order: list[int] = []

    async def reward(problem: Problem, answer: Trajectory) -> Score:
        while problem.problem_id == "p/0":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                order.append(-1)  # it does not even stop when it is told to
                if order.count(-1) > 1:
                    raise
        return Score(1.0, True)

    worker._reward = reward

    async def grade() -> dict[int, Grade]:
        grades = {}
        async for together in worker.grade(ITEMS):
            order.extend(index for index, _ in together)
            grades |= dict(together)
        return grades

    grades = asyncio.run(grade())
    cause = (
        "RewardError: reward 'exact_match' could not grade problem p/0: it took longer than reward.deadline_seconds (0.2)"
    )
    assert grades == {0: Failure("grade", cause)} | dict.fromkeys((1, 2, 3), Score(1.0, True))
    assert [index for index in order if index >= 0] == [1, 2, 3, 0]


def test_rewards_have_a_deadline_by_default(tmp_path):
    assert tiny_config(tmp_path).reward.deadline_seconds == 60.0


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (32, 4)])
def test_answers_of_one_call_are_graded_concurrently_up_to_a_bound(tmp_path, concurrency, most):
    worker, running, seen = role(tmp_path, concurrency=concurrency), 0, []

    async def reward(problem: Problem, answer: Trajectory) -> Score:
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0.001)
        running -= 1
        return Score(1.0, True)

    worker._reward = reward
    assert grades_of(worker, ITEMS) == [Score(1.0, True)] * 4
    assert max(seen) == most


# -------------------------------------------------------------------------------------------------- deadly answers
@dataclass
class FragileGrader(ExactGrader):
    """Grader that dies of the answers to problem `deadly`, whatever else it was given with it."""

    name: str
    deadly: str
    calls: list[list[str]] = field(default_factory=list)
    is_dead: bool = False

    async def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]:
        self.calls.append([problem.problem_id for problem, _ in items])
        self.is_dead = self.is_dead or self.deadly in self.calls[-1]
        if self.is_dead:
            raise RoleDied(f"{self.name} died while grading")
        yield [(index, Score(0.5, problem.answer == t.turns[-1].text)) for index, (problem, t) in enumerate(items)]


def retry_with_successors(collecting: RolloutScheduler, graders: list[FragileGrader]) -> Rollout:
    """Collect as the fleet does: when no grader is left, the scheduler gets successors and is asked again."""

    async def collect() -> Rollout:
        for _ in range(20):
            try:
                return await collecting.collect(REQUEST, 60.0)
            except RoleDied:
                successors = [replace(grader, is_dead=False) for grader in graders]
                collecting.add_workers([], successors)
        raise AssertionError("every stage lost all its graders")

    return asyncio.run(collect())


@pytest.mark.parametrize("num_graders", [1, 2])
def test_an_answer_that_kills_its_reward_worker_is_counted_as_failed_and_the_others_are_graded(num_graders):
    texts = ["123", "456", "789", "321"]
    graders = [FragileGrader(f"grader {number}", deadly="given/2") for number in range(num_graders)]
    rollout = retry_with_successors(scheduler(texts, *graders), graders)
    failed = [t for t in rollout.trajectories if t.failure is not None]
    assert {t.problem_id for t in failed} == {"given/2"}
    assert all(f"problem given/2: {MAX_GRADER_DEATHS} reward workers in a row died" in t.failure.cause for t in failed)
    healthy = [t for t in collect(texts).trajectories if t.problem_id != "given/2"]
    assert [t for t in rollout.trajectories if t.failure is None] == healthy
    calls = [call for grader in graders for call in grader.calls]
    assert sum("given/2" in call for call in calls) == MAX_GRADER_DEATHS


def test_two_graders_that_die_by_chance_cost_no_grade():
    texts = ["123", "456", "789", "321"]
    dead = [FragileGrader(f"dying {number}", deadly="none", is_dead=True) for number in range(MAX_GRADER_DEATHS - 1)]
    assert collect(texts, *dead, ExactGrader()).trajectories == collect(texts).trajectories


@dataclass
class SilentWorker:
    """Client of a reward worker that a reward blocks."""

    name: str = "reward worker 0"
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def ping(self) -> None:
        await asyncio.Event().wait()

    def kill(self) -> None:
        self.killed.set()


def test_a_reward_worker_that_a_reward_blocks_is_ended_after_the_heartbeat_deadline(tmp_path):
    config = tiny_config(tmp_path, deadlines={"heartbeat": 0.04})

    async def run() -> None:
        worker = SilentWorker()
        run = RunRef(run_id="run-1", store_uri=config.store.uri, config_digest="")
        scheduling = SchedulerRole(config, run, tmp_path / "scratch", [], [worker])
        await scheduling.start()
        await scheduling.on_adopted(0)
        await asyncio.wait_for(worker.killed.wait(), 60.0)

    asyncio.run(run())
