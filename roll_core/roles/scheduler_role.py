"""The rollout scheduler as a Ray actor: batches go from here to the trainer as object references, and to the store."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle

from roll_core.config.run import RunConfig
from roll_core.data.problem_source import build_source
from roll_core.errors import RewardUnavailable, RoleDied, RollError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.roles.process import settle
from roll_core.rollout import metrics
from roll_core.rollout.renderer import build_renderer
from roll_core.rollout.scheduler import Finished, RolloutScheduler
from roll_core.rollout.unfinished import Unfinished
from roll_core.store.object_store import ObjectStore
from roll_core.store.rollouts import encode_trajectories
from roll_core.store.write_behind import WriteBehind
from roll_core.types.manifest import Collected, CollectRequest, Evaluated
from roll_core.types.refs import ArtifactKind, ArtifactRef
from roll_core.types.trajectory import Failure, Problem, Score, Trajectory


@dataclass(frozen=True)
class RemoteEngine:
    name: str
    actor: ActorHandle

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        try:
            async for finished in self.actor.generate.options(num_returns="streaming").remote(requests):
                yield await finished
        except ray.exceptions.RayActorError:
            raise RoleDied(f"{self.name} died while generating") from None

    async def abort(self, request_ids: list[str]) -> None:
        try:
            await self.actor.abort.remote(request_ids)
        except ray.exceptions.RayActorError:
            raise RoleDied(f"{self.name} died while generating") from None


@dataclass(frozen=True)
class RemoteGrader:
    name: str
    actor: ActorHandle

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure | RewardUnavailable]:
        try:
            return await self.actor.grade.remote(items)
        except ray.exceptions.RayActorError:
            raise RoleDied(f"{self.name} died while grading") from None


class SchedulerRole:
    def __init__(
        self, config: RunConfig, store_uri: str, scratch: Path, engines: list[RemoteEngine], graders: list[RemoteGrader]
    ):
        self._config = config
        self._unfinished = Unfinished(scratch / "unfinished")
        store = ObjectStore(store_uri, config.store.retry_seconds)
        self._spool = WriteBehind(store, scratch / "spool", config.store.spool_megabytes * 10**6)
        self._scheduler = RolloutScheduler(
            config.rollout,
            seed=config.seed,
            source=build_source(config.problems, config.seed),
            renderer=build_renderer(config.model),
            engines=engines,
            graders=graders,
            greedy_baseline=config.algorithm.samples_greedily,
        )

    async def start(self) -> None:
        """What an earlier leg generated and could not store is stored first: kept answers name it."""
        await asyncio.to_thread(self._spool.store_leftovers)
        settle()

    async def collect(self, request: CollectRequest) -> tuple[Collected, list[ray.ObjectRef]]:
        """The receipt, and the trajectories as a reference (in a list, so that Ray does not fetch them for the caller).

        What a collect that failed had generated is taken up by the next one of the same request, in this leg or another.
        """
        try:
            with self._unfinished.kept(request.request_id) as finished:
                return await self._collect(request, finished)
        except RewardUnavailable as error:
            raise RewardUnavailable(
                f"collect {request.iteration}: {error}: the {len(finished)} trajectories generated so far are kept, "
                "and graded once it is back"
            ) from None

    async def _collect(self, request: CollectRequest, finished: Finished) -> tuple[Collected, list[ray.ObjectRef]]:
        rollout = await self._scheduler.collect(request, self._config.deadlines.collect, finished)
        trajectories = rollout.trajectories
        refuse_if_none_graded(trajectories, f"collect {request.iteration}")
        collected = Collected(
            request=request,
            trajectories=await self._keep(trajectories),
            draws=rollout.draws,
            num_trajectories=len(trajectories),
            num_failed=sum(t.failure is not None for t in trajectories),
            num_tokens=sum(t.num_completion_tokens for t in trajectories),
            metrics=rollout.metrics | metrics.describe(trajectories, request.weights_version),
        )
        return collected, [ray.put(trajectories)]

    async def evaluate(self, weights_version: int) -> Evaluated:
        num_problems = self._config.evaluation.num_problems
        trajectories = await self._scheduler.evaluate(num_problems, self._config.deadlines.evaluate)
        refuse_if_none_graded(trajectories, f"evaluate version {weights_version}")
        return Evaluated(
            weights_version=weights_version,
            num_problems=num_problems,
            accuracy=metrics.accuracy(trajectories),
            trajectories=await self._keep(trajectories),
            metrics={
                "accuracy/held_out": metrics.accuracy(trajectories),
                "accuracy/held_out_failed": float(sum(t.score is None for t in trajectories)),
            },
        )

    async def wait_until_stored(self, artifacts: list[ArtifactRef]) -> None:
        await asyncio.to_thread(self._spool.wait, artifacts, self._config.deadlines.store)

    async def _keep(self, trajectories: list[Trajectory]) -> ArtifactRef:
        """On disk now, in the store before anything is committed that names them. Waits where the spool is full."""
        data = encode_trajectories(trajectories)
        return await asyncio.to_thread(self._spool.put, data, ArtifactKind.TRAJECTORIES)


def refuse_if_none_graded(trajectories: list[Trajectory], stage: str) -> None:
    """A batch without a single grade is an outage, not an answer: it must not be kept as the stage's result."""
    failures = [t.failure for t in trajectories if t.failure is not None]
    if len(failures) == len(trajectories):
        raise RollError(f"{stage}: every trajectory failed, the first with: {failures[0].cause}")
