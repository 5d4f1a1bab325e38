r"""Reward for mathematical equality by Math-Verify: \frac{1}{2} is 0.5. It runs in a subprocess, because it may hang."""

import logging

from roll_core.config.rewards import MathVerify
from roll_core.extras import Extra, require
from roll_core.rewards.base import Reward
from roll_core.rewards.subprocess_grader import GradeFunction, SubprocessGrader
from roll_core.types.trajectory import Problem, Score, Trajectory

NO_TIMEOUT = 0
"""Timeout for Math-Verify that disables its own, which uses signals: the subprocess has a deadline."""


class MathVerifyReward(Reward):
    """Reward of 1 if the answer equals the expected one mathematically."""

    def __init__(self, config: MathVerify):
        require("math_verify", Extra.MATH, "reward.kind math_verify")
        self._grader = SubprocessGrader(config.kind, "roll_core.rewards.math_verify", config)

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Score:
        return await self._grader.grade(problem, {"expected": problem.answer, "given": trajectory.turns[-1].text})

    async def close(self) -> None:
        await self._grader.close()


def load_grader() -> GradeFunction:
    """Load the grading function; runs in the subprocess.

    An answer without anything to compare is wrong, and so is an answer that cannot be parsed.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout

    def grade(request: dict[str, str]) -> Score:
        expected = parse(f"${request['expected']}$", parsing_timeout=NO_TIMEOUT)
        if not expected:
            raise ValueError(f"its answer '{request['expected']}' is not mathematics")
        given = parse(request["given"], parsing_timeout=NO_TIMEOUT)
        correct = verify(expected, given, timeout_seconds=NO_TIMEOUT, raise_on_error=True)
        return Score(value=float(correct), correct=correct)

    return grade
