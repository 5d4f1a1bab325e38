"""Reward for the last number in the answer, compared as a number: for word problems answered in prose."""

import re

from roll_core.errors import RewardError
from roll_core.rewards.base import Reward
from roll_core.types.trajectory import Problem, Score, Trajectory

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
"""Decimal number, with optional thousands separators."""


class NumberMatchReward(Reward):
    """Reward of 1 if the last number of the answer is within `tolerance` of the expected one."""

    def __init__(self, tolerance: float):
        self._tolerance = tolerance

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Score:
        try:
            expected = float(problem.answer.replace(",", ""))
        except ValueError:
            raise RewardError("number_match", problem.problem_id, f"its answer '{problem.answer}' is not a number") from None
        numbers = _NUMBER.findall(trajectory.turns[-1].text)
        correct = bool(numbers) and abs(float(numbers[-1].replace(",", "")) - expected) <= self._tolerance
        return Score(value=float(correct), correct=correct)
