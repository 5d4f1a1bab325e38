"""A reward worker as a Ray actor: user code runs here, away from models. What it raises becomes a counted failure."""

import math

from roll_core.config.run import RunConfig
from roll_core.errors import RewardError
from roll_core.rewards.base import build_reward
from roll_core.roles.process import settle
from roll_core.types.trajectory import Failure, Problem, Score, Trajectory


class RewardRole:
    def __init__(self, config: RunConfig):
        self._reward = build_reward(config.reward)

    async def start(self) -> None:
        settle()

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure]:
        return [await self._grade_one(problem, trajectory) for problem, trajectory in items]

    async def _grade_one(self, problem: Problem, trajectory: Trajectory) -> Score | Failure:
        try:
            score = await self._reward(problem, trajectory)
            if not math.isfinite(score.value):
                raise RewardError("reward", problem.problem_id, f"it answered {score.value}")
            return score
        except Exception as error:  # the boundary to user code: whatever it raises must not take the siblings with it
            return Failure(stage="grade", cause=f"{type(error).__name__}: {error}")
