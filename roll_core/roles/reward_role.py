"""A reward worker as a Ray actor: user code runs here, away from models. What it raises becomes a counted failure, unless it
is about a service that does not answer: then grading is repeated."""

import asyncio
import math

from roll_core.config.run import RunConfig
from roll_core.errors import FailureClass, RewardError, RewardUnavailable, classify
from roll_core.retries import pauses
from roll_core.rewards.base import build_reward
from roll_core.roles.process import settle
from roll_core.types.trajectory import Failure, Problem, Score, Trajectory


class RewardRole:
    def __init__(self, config: RunConfig):
        self._reward = build_reward(config.reward)
        self._name = config.reward.kind
        self._retries = config.retries

    async def start(self) -> None:
        settle()

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure | RewardUnavailable]:
        """One answer per item. Where the reward stayed unavailable that is the answer, so that grades given before are kept;
        the items behind it are not tried, since each would be waited for as long."""
        answers: list[Score | Failure | RewardUnavailable] = []
        for problem, trajectory in items:
            if answers and isinstance(answers[-1], RewardUnavailable):
                answers.append(answers[-1])
            else:
                answers.append(await self._grade_one(problem, trajectory))
        return answers

    async def _grade_one(self, problem: Problem, trajectory: Trajectory) -> Score | Failure | RewardUnavailable:
        for pause in pauses(self._retries):
            answer = await self._ask(problem, trajectory)
            if not isinstance(answer, RewardUnavailable):
                return answer
            await asyncio.sleep(pause)
        return await self._ask(problem, trajectory)

    async def _ask(self, problem: Problem, trajectory: Trajectory) -> Score | Failure | RewardUnavailable:
        try:
            score = await self._reward(problem, trajectory)
            if not math.isfinite(score.value):
                raise RewardError(self._name, problem.problem_id, f"it answered {score.value}")
            return score
        except Exception as error:  # the boundary to user code: whatever it raises must not take the siblings with it
            cause = f"{type(error).__name__}: {error}"
            if classify(error) is not FailureClass.TRANSIENT:
                return Failure(stage="grade", cause=cause)
            attempts = self._retries.repeats + 1
            return RewardUnavailable(f"reward '{self._name}' was unavailable {attempts} times in a row (last: {cause})")
