"""Reward by the scorer of a Reasoning Gym task. Some scorers evaluate what the policy wrote, so they run in a subprocess."""

import json
import math
import re
from functools import lru_cache
from typing import Any

from roll_core.config.rewards import ReasoningGym
from roll_core.data.reasoning_gym import generate_item, load_task
from roll_core.errors import RewardError
from roll_core.extras import Extra, require
from roll_core.rewards.base import Reward
from roll_core.rewards.subprocess_grader import GradeFunction, SubprocessGrader
from roll_core.types.trajectory import Problem, Score, Trajectory


class ReasoningGymReward(Reward):
    """Reward of the problem's own Reasoning Gym scorer (0 to 1)."""

    def __init__(self, config: ReasoningGym):
        require("reasoning_gym", Extra.MATH, "reward.kind reasoning_gym")
        self._tag = config.tag
        self._grader = SubprocessGrader(config.kind, "roll_core.rewards.reasoning_gym", config)

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Score:
        if not problem.recipe:
            raise RewardError("reasoning_gym", problem.problem_id, "it is not a problem of Reasoning Gym")
        given = text_in_tag(trajectory.turns[-1].text, self._tag)
        return await self._grader.grade(problem, {"recipe": problem.recipe, "given": given})

    async def close(self) -> None:
        await self._grader.close()


def text_in_tag(text: str, tag: str | None) -> str:
    """Return the text in the last pair of tags; without one, the whole text: ('so <answer>7</answer>', 'answer') -> '7'."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) if tag else []
    return (found[-1] if found else text).strip()


def load_grader() -> GradeFunction:
    """Load the grading function; runs in the subprocess."""
    import reasoning_gym  # noqa: F401  (takes seconds, which must not count against the deadline of an answer)

    return _grade


def _grade(request: dict[str, str]) -> Score:
    recipe = json.loads(request["recipe"])
    scorer = load_task(recipe["task"], json.dumps(recipe["params"]))
    value = float(scorer.score_answer(request["given"], _item(request["recipe"])))
    return Score(value=value, correct=value >= 1.0 or math.isclose(value, 1.0))


@lru_cache(maxsize=1024)
def _item(recipe: str) -> dict[str, Any]:
    """Item of a problem, regenerated from its recipe; cached because the whole group is graded with it."""
    return generate_item(**json.loads(recipe))
