"""Mathematical equality by Math-Verify: \\frac{1}{2} is 0.5. Comparing may take for ever, so it happens elsewhere."""

import logging

from roll_core.config.rewards import MathVerify
from roll_core.extras import Extra, require
from roll_core.rewards.subprocess_grader import Grade, SubprocessGrader
from roll_core.types.trajectory import Problem, Score, Trajectory

NO_LIMIT = 0
"""Of Math-Verify's own, which signals: the deadline is the process's."""


class MathVerifyReward:
    def __init__(self, config: MathVerify):
        require("math_verify", Extra.MATH, "reward.kind math_verify")
        self._grader = SubprocessGrader(config.kind, "roll_core.rewards.math_verify", config)

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Score:
        return await self._grader.grade(problem, {"expected": problem.answer, "given": trajectory.turns[-1].text})


def load_grader() -> Grade:
    """Runs in the grader's process. An answer without anything to compare is wrong; so is one that cannot be parsed."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of having no limit

    def grade(request: dict[str, str]) -> Score:
        expected = parse(f"${request['expected']}$", parsing_timeout=NO_LIMIT)
        if not expected:
            raise ValueError(f"its answer '{request['expected']}' is not mathematics")
        given = parse(request["given"], parsing_timeout=NO_LIMIT)
        correct = verify(expected, given, timeout_seconds=NO_LIMIT, raise_on_error=True)
        return Score(value=float(correct), correct=correct)

    return grade
