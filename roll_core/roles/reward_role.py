"""Reward worker as a Ray actor: user code runs here, away from models. An exception or a missed deadline becomes a counted
failure, unless a service that the reward needs is unavailable: then grading is retried."""

import asyncio
import math
from collections.abc import AsyncIterator

from roll_core.concurrency import as_they_finish
from roll_core.config.rewards import InProcessGrading
from roll_core.config.run import RunConfig
from roll_core.errors import FailureClass, RewardError, RewardUnavailable, classify
from roll_core.retries import backoff_delays
from roll_core.rewards.build import build_reward
from roll_core.roles.process import freeze_garbage_collector
from roll_core.rollout.router import Grade, GradingItem
from roll_core.types.trajectory import Failure, Problem, Score, Trajectory


class RewardRole:
    """Ray actor that grades trajectories with the run's reward, several at once."""

    def __init__(self, config: RunConfig):
        self._reward = build_reward(config.reward)
        self._name = config.reward.kind
        self._retries = config.retries
        self._slots = asyncio.Semaphore(config.reward.at_once)
        """Limit of the answers graded at once, over all calls."""
        self._deadline_s = config.reward.deadline_seconds if isinstance(config.reward, InProcessGrading) else None
        """Longest time of one call of the reward. None for graders in subprocesses, which have their own deadline."""

    async def start(self) -> None:
        """Exempt the loaded reward from garbage collection."""
        freeze_garbage_collector()

    async def close(self) -> None:
        """End what the reward started."""
        await self._reward.close()

    async def ping(self) -> None:
        """Return at once: a worker that is blocked by a reward does not get here."""

    async def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]:
        """Yield (index of the item, its grade) as items are graded, several at a time.

        A reward that stays unavailable is a grade and not raised, so that the other grades are kept. The items that were not
        begun by then get the same grade untried, since each would be retried as long.
        """
        outages: list[RewardUnavailable] = []
        async for graded in as_they_finish(self._grade_item(index, item, outages) for index, item in enumerate(items)):
            yield graded

    async def _grade_item(self, index: int, item: GradingItem, outages: list[RewardUnavailable]) -> tuple[int, Grade]:
        """Grade one item of a call when a slot is free; add an outage to those that the items of the call share."""
        async with self._slots:
            grade = outages[0] if outages else await self._grade_one(*item)
        if isinstance(grade, RewardUnavailable):
            outages.append(grade)
        return index, grade

    async def _grade_one(self, problem: Problem, trajectory: Trajectory) -> Grade:
        """Grade one item; retry with backoff while the reward is unavailable."""
        for pause in backoff_delays(self._retries):
            result = await self._grade_once(problem, trajectory)
            if not isinstance(result, RewardUnavailable):
                return result
            await asyncio.sleep(pause)
        return await self._grade_once(problem, trajectory)

    async def _grade_once(self, problem: Problem, trajectory: Trajectory) -> Grade:
        """Call the reward once and turn its exception into a result."""
        try:
            score = await self._call_reward(problem, trajectory)
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

    async def _call_reward(self, problem: Problem, trajectory: Trajectory) -> Score:
        """Return the reward's score. A reward that is not back in time is cancelled and no longer waited for, even if it
        ignores that."""
        grading = asyncio.ensure_future(self._reward(problem, trajectory))
        try:
            await asyncio.wait({grading}, timeout=self._deadline_s)
            if not grading.done():
                limit = f"reward.deadline_seconds ({self._deadline_s:g})"
                raise RewardError(self._name, problem.problem_id, f"it took longer than {limit}")
            return grading.result()
        finally:
            grading.cancel()
