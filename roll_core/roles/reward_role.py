"""Reward worker as a Ray actor: user code runs here, away from models. An exception becomes a counted failure, unless a
service that the reward needs is unavailable: then grading is retried."""

import asyncio
import math

from roll_core.config.run import RunConfig
from roll_core.errors import FailureClass, RewardError, RewardUnavailable, classify
from roll_core.retries import backoff_delays
from roll_core.rewards.base import build_reward
from roll_core.roles.process import freeze_garbage_collector
from roll_core.types.trajectory import Failure, Problem, Score, Trajectory


class RewardRole:
    """Ray actor that grades trajectories with the run's reward."""

    def __init__(self, config: RunConfig):
        self._reward = build_reward(config.reward)
        self._name = config.reward.kind
        self._retries = config.retries

    async def start(self) -> None:
        """Exempt the loaded reward from garbage collection."""
        freeze_garbage_collector()

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure | RewardUnavailable]:
        """Return one result per item, in order. A reward that stays unavailable is returned as a result and not raised, so
        that earlier grades are kept. The items behind it get the same result untried, since each would be retried as long.
        """
        results: list[Score | Failure | RewardUnavailable] = []
        for problem, trajectory in items:
            if results and isinstance(results[-1], RewardUnavailable):
                results.append(results[-1])
            else:
                results.append(await self._grade_one(problem, trajectory))
        return results

    async def _grade_one(self, problem: Problem, trajectory: Trajectory) -> Score | Failure | RewardUnavailable:
        """Grade one item; retry with backoff while the reward is unavailable."""
        for pause in backoff_delays(self._retries):
            result = await self._grade_once(problem, trajectory)
            if not isinstance(result, RewardUnavailable):
                return result
            await asyncio.sleep(pause)
        return await self._grade_once(problem, trajectory)

    async def _grade_once(self, problem: Problem, trajectory: Trajectory) -> Score | Failure | RewardUnavailable:
        """Call the reward once and turn its exception into a result."""
        try:
            score = await self._reward(problem, trajectory)
            if not math.isfinite(score.value):
                raise RewardError(self._name, problem.problem_id, f"it answered {score.value}")
            return score
        except Exception as error:  # the boundary to user code: its exceptions must not fail other items
            cause = f"{type(error).__name__}: {error}"
            # Grading that runs out of memory is the fault of what it grades: the next item gets the memory back.
            if isinstance(error, MemoryError) or classify(error) is not FailureClass.TRANSIENT:
                return Failure(stage="grade", cause=cause)
            attempts = self._retries.repeats + 1
            return RewardUnavailable(f"reward '{self._name}' was unavailable {attempts} times in a row (last: {cause})")
