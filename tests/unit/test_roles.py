"""What roles do with user code that misbehaves, without a cluster."""

import asyncio

import pytest

from roll_core.errors import RollError
from roll_core.roles.reward_role import RewardRole
from roll_core.roles.scheduler_role import refuse_if_none_graded
from roll_core.types.trajectory import Failure, Message, Problem, Score, Speaker, Trajectory
from tests.support import tiny_config, trajectory

PROBLEM = Problem("p/1", "p", (Message(Speaker.USER, "?"),), "42")


async def raising(problem: Problem, attempt: Trajectory) -> Score:
    raise KeyError("no such column")


async def not_a_number(problem: Problem, attempt: Trajectory) -> Score:
    return Score(float("nan"), False)


@pytest.mark.parametrize(("reward", "says"), [(raising, "KeyError: 'no such column'"), (not_a_number, "it answered nan")])
def test_a_reward_that_misbehaves_becomes_a_failure_and_never_a_score(tmp_path, reward, says):
    role = RewardRole(tiny_config(tmp_path))
    role._reward = reward
    (answer,) = asyncio.run(role.grade([(PROBLEM, trajectory(0, 0, None))]))
    assert isinstance(answer, Failure)
    assert says in answer.cause


def test_a_batch_without_a_grade_is_refused_and_one_with_a_single_grade_is_not():
    failed = [trajectory(0, 0, None), trajectory(0, 1, None)]
    with pytest.raises(RollError, match="collect 4: every trajectory failed, the first with: boom"):
        refuse_if_none_graded(failed, "collect 4")
    refuse_if_none_graded([*failed, trajectory(0, 2, 0.0)], "collect 4")
