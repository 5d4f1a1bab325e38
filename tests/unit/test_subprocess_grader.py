"""Rewards that grade in subprocesses: right and wrong answers, deadlines, crashes, and the replacement of processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from roll_core.config.problems import GymTask, ReasoningGymProblems
from roll_core.config.rewards import MathVerify, ReasoningGym, SubprocessGrading
from roll_core.data.reasoning_gym import ReasoningGymSource
from roll_core.errors import FailureClass, RewardError, UserError, classify
from roll_core.rewards.base import Reward
from roll_core.rewards.build import build_reward
from roll_core.rewards.reasoning_gym import text_in_tag
from roll_core.rewards.subprocess_grader import ONE_THREAD, PASSED_ON, SubprocessGrader
from roll_core.roles.reward_role import RewardRole
from roll_core.types.trajectory import Failure, Message, Problem, Score, Speaker, Trajectory
from tests.support import grades_in_order, tiny_config, trajectory

T = TypeVar("T")
TOWER = "$9^{9^{9^{9^{9}}}}$"
"""Expression whose evaluation does not end."""


def problem(answer: str) -> Problem:
    return Problem("p/1", "p", (Message(Speaker.USER, "?"),), answer)


def answered_with(text: str) -> Trajectory:
    """Trajectory whose only turn is `text`."""
    answered = trajectory(0, 0, 0.0)
    return replace(answered, turns=(replace(answered.turns[0], text=text),))


def grade_all(reward: Reward, *items: tuple[Problem, str]) -> list[Score | BaseException]:
    """Grade all answers concurrently in one event loop, as a reward worker does, then end the reward's processes."""

    async def grade() -> list[Score | BaseException]:
        return await asyncio.gather(*(reward(p, answered_with(text)) for p, text in items), return_exceptions=True)

    return asyncio.run(closing(reward, grade()))


async def closing(reward: Reward | RewardRole | SubprocessGrader, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, after the reward's processes have ended."""
    try:
        return await work
    finally:
        await reward.close()


# -------------------------------------------------------------------------------------------------- Math-Verify
def test_mathematically_equal_answers_are_right():
    right = [
        ("42", "So the answer is 42."),
        (r"\frac{1}{2}", "It is $0.5$."),
        ("1,080", r"\boxed{1080}"),
        ("x^2 - 1", "$(x - 1)(x + 1)$"),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ]
    wrong = [("42", "It is 41."), ("42", "no idea"), (r"\frac{1}{2}", r"\boxed{2}"), ("42", r"\frac{{{")]
    items = [(problem(answer), text) for answer, text in right + wrong]
    expected = [Score(1.0, True)] * len(right) + [Score(0.0, False)] * len(wrong)
    assert grade_all(build_reward(MathVerify()), *items) == expected


def test_an_answer_that_exceeds_the_deadline_costs_its_own_trajectory_only():
    reward = build_reward(MathVerify(deadline_seconds=3.0, processes=1))
    late, right = grade_all(reward, (problem("7"), TOWER), (problem("7"), "$3 + 4$"))
    assert isinstance(late, RewardError)
    assert str(late) == ("reward 'math_verify' could not grade problem p/1: it took longer than reward.deadline_seconds (3)")
    assert classify(late) is FailureClass.DATA, "not tried again"
    assert right == Score(1.0, True)


def test_a_problem_without_mathematics_cannot_be_graded():
    [failed] = grade_all(build_reward(MathVerify()), (problem(""), "42"))
    assert str(failed).endswith("could not grade problem p/1: ValueError: its answer '' is not mathematics")


def test_in_the_reward_worker_a_late_answer_is_a_failure_and_never_a_zero(tmp_path):
    reward = {"kind": "math_verify", "deadline_seconds": 3.0}
    worker = RewardRole(tiny_config(tmp_path, reward=reward))
    items = [(problem("7"), answered_with("7")), (problem("7"), answered_with(TOWER)), (problem("7"), answered_with("8"))]
    right, late, wrong = asyncio.run(closing(worker, grades_in_order(worker, items)))
    assert (right, wrong) == (Score(1.0, True), Score(0.0, False))
    assert isinstance(late, Failure)
    assert "it took longer than reward.deadline_seconds (3)" in late.cause


# -------------------------------------------------------------------------------------------------- any grader
@pytest.fixture
def grader(tmp_path, monkeypatch) -> SubprocessGrader:
    """Grader that grades, dies, hangs or runs out of memory, as the request says."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_grader.py").write_text(
        "import os, time\n"
        "from roll_core.types.trajectory import Score\n"
        "def grade(request):\n"
        "    print('graders may print')\n"
        "    match request['do']:\n"
        "        case 'die': os._exit(1)\n"
        "        case 'hang': time.sleep(3600)\n"
        "        case 'fill': bytes(2**40)\n"
        "        case 'show': raise ValueError(' '.join(sorted(os.environ)))\n"
        "    return Score(float(os.getpid()), True)\n"
        "def load_grader():\n"
        "    return grade\n"
    )
    return SubprocessGrader("theirs", "their_grader", SubprocessGrading(deadline_seconds=5.0, processes=1))


def test_a_process_serves_many_answers_and_is_replaced_when_one_kills_it(grader):
    async def grade_all_requests() -> list[float | str]:
        found: list[float | str] = []
        for do in ("grade", "grade", "fill", "grade", "die", "grade", "hang", "grade"):
            try:
                found.append((await grader.grade(problem(""), {"do": do})).value)
            except RewardError as error:
                found.append(error.cause)
        return found

    first, same, full, still, dead, second, late, third = asyncio.run(closing(grader, grade_all_requests()))
    assert first == same == still
    assert len({first, second, third}) == 3
    assert full == "MemoryError"
    assert dead == "its process died of it"
    assert late == "it took longer than reward.deadline_seconds (5)"


def test_a_grader_gets_no_keys_or_passwords_from_the_environment(grader, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY", "MLFLOW_TRACKING_PASSWORD", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "secret")
    with pytest.raises(RewardError) as raised:
        asyncio.run(closing(grader, grader.grade(problem(""), {"do": "show"})))
    allowed = {*PASSED_ON, *ONE_THREAD, "PYTHONPATH", "LC_CTYPE"}  # Python sets LC_CTYPE itself
    assert set(raised.value.cause.removeprefix("ValueError: ").split()) <= allowed


def test_the_process_of_a_cancelled_request_is_replaced(grader):
    async def grade_around_a_cancellation() -> tuple[float, float]:
        before = await grader.grade(problem(""), {"do": "grade"})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(grader.grade(problem(""), {"do": "hang"}), 0.05)
        return before.value, (await grader.grade(problem(""), {"do": "grade"})).value

    before, after = asyncio.run(closing(grader, grade_around_a_cancellation()))
    assert before != after


def test_a_process_whose_reward_worker_is_gone_ends_by_itself(grader):
    command = [sys.executable, "-m", "roll_core.rewards.subprocess_grader", "their_grader", "0.2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=b'{"do": "hang"}\n', env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGALRM
    assert done.stdout == b"started\n"


def test_a_grader_that_does_not_start_counts_as_unavailable():
    grader = SubprocessGrader("theirs", "no_such_grader", SubprocessGrading())
    with pytest.raises(ConnectionError, match="the process of reward 'theirs' died while starting") as raised:
        asyncio.run(closing(grader, grader.grade(problem(""), {})))
    assert classify(raised.value) is FailureClass.TRANSIENT


# -------------------------------------------------------------------------------------------------- Reasoning Gym
def test_reasoning_gym_grades_with_the_scorer_of_the_task():
    tasks = (GymTask(name="chain_sum", params={"max_terms": 2}), GymTask(name="countdown"), GymTask(name="gsm_symbolic"))
    source = ReasoningGymSource(ReasoningGymProblems(tasks=tasks), seed=0)
    problems = [source.problem(index) for index in range(12)]
    assert {p.domain for p in problems} == {"chain_sum", "countdown", "gsm_symbolic"}
    items = [(p, f"Well: <answer> {p.answer} </answer>") for p in problems] + [(p, "no idea") for p in problems]
    scores = grade_all(build_reward(ReasoningGym()), *items)
    assert scores[:12] == [Score(1.0, True)] * 12
    assert all(isinstance(score, Score) and score.value < 0.5 and not score.correct for score in scores[12:])


def test_the_text_in_the_last_tags_is_the_answer():
    assert text_in_tag("<answer>1</answer> no, <answer>\n7 </answer>", "answer") == "7"
    assert text_in_tag(" 7\n", "answer") == "7"
    assert text_in_tag("<answer>7</answer>", None) == "<answer>7</answer>"


def test_reasoning_gym_grades_no_other_problems(tmp_path):
    with pytest.raises(
        UserError, match="reward.kind reasoning_gym grades problems.kind reasoning_gym alone, not arithmetic: change one"
    ):
        tiny_config(tmp_path, reward={"kind": "reasoning_gym"})


# -------------------------------------------------------------------------------------------------- missing packages
@pytest.mark.parametrize(
    ("module", "build", "message"),
    [
        ("math_verify", lambda: build_reward(MathVerify()), "reward.kind math_verify: the package math_verify is missing"),
        ("reasoning_gym", lambda: build_reward(ReasoningGym()), "reward.kind reasoning_gym: the package reasoning_gym is"),
        (
            "reasoning_gym",
            lambda: ReasoningGymSource(ReasoningGymProblems(tasks=(GymTask(name="chain_sum"),)), 0),
            "problems.kind reasoning_gym: the package reasoning_gym is missing",
        ),
    ],
)
def test_a_missing_package_is_reported_in_one_sentence(monkeypatch, module, build, message):
    monkeypatch.setattr("roll_core.extras.find_spec", lambda name: None if name == module else object())
    with pytest.raises(UserError, match=f"^{message}.* pip install 'roll-rl\\[math\\]'$"):
        build()
