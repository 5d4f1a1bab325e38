"""Reasoning Gym's own scorer of a task. Some evaluate what the policy wrote, so it happens in a process of its own."""

import json
import math
import re
from functools import lru_cache
from typing import Any

from roll_core.config.rewards import ReasoningGym
from roll_core.data.reasoning_gym import generate, generator
from roll_core.errors import RewardError
from roll_core.extras import Extra, require
from roll_core.rewards.subprocess_grader import Grade, SubprocessGrader
from roll_core.types.trajectory import Problem, Score, Trajectory


class ReasoningGymReward:
    def __init__(self, config: ReasoningGym):
        require("reasoning_gym", Extra.MATH, "reward.kind reasoning_gym")
        self._tag = config.tag
        self._grader = SubprocessGrader(config.kind, "roll_core.rewards.reasoning_gym", config)

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Score:
        if not problem.recipe:
            raise RewardError("reasoning_gym", problem.problem_id, "it is not a problem of Reasoning Gym")
        given = tagged(trajectory.turns[-1].text, self._tag)
        return await self._grader.grade(problem, {"recipe": problem.recipe, "given": given})


def tagged(text: str, tag: str | None) -> str:
    """What stands in the last pair of tags, or all of a text without one: ('so <answer>7</answer>', 'answer') -> '7'."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) if tag else []
    return (found[-1] if found else text).strip()


def load_grader() -> Grade:
    """Runs in the grader's process."""
    import reasoning_gym  # noqa: F401  (takes seconds, which no answer should pay for)

    return _grade


def _grade(request: dict[str, str]) -> Score:
    recipe = json.loads(request["recipe"])
    scorer = generator(recipe["task"], json.dumps(recipe["params"]))
    value = float(scorer.score_answer(request["given"], _item(request["recipe"])))
    return Score(value=value, correct=value >= 1.0 or math.isclose(value, 1.0))


@lru_cache(maxsize=1024)
def _item(recipe: str) -> dict[str, Any]:
    """The item of a problem; its whole group is graded with one."""
    return generate(**json.loads(recipe))
