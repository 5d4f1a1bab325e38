"""The rollout scheduler as a Ray actor: batches go from here to the trainer as object references, and to the store."""

import asyncio
import logging
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
from roll_core.roles.waiting import GONE
from roll_core.rollout import metrics
from roll_core.rollout.journal import Journal
from roll_core.rollout.renderer import build_renderer
from roll_core.rollout.scheduler import RolloutScheduler
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import encode_trajectories
from roll_core.store.records.traces import encode_trace
from roll_core.store.write_behind import WriteBehind
from roll_core.types.manifest import Collected, CollectRequest, Evaluated
from roll_core.types.refs import ArtifactKind, ArtifactRef, RunRef
from roll_core.types.trajectory import Failure, Problem, Score, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteEngine:
    name: str
    actor: ActorHandle

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        try:
            async for finished in self.actor.generate.options(num_returns="streaming").remote(requests):
                yield await finished
        except GONE:
            raise RoleDied(f"{self.name} died while generating") from None

    async def abort(self, request_ids: list[str]) -> None:
        try:
            await self.actor.abort.remote(request_ids)
        except ray.exceptions.RayActorError:
            raise RoleDied(f"{self.name} died while generating") from None

    async def answers(self) -> None:
        try:
            await self.actor.answer.remote()
        except ray.exceptions.RayActorError:
            raise RoleDied(f"{self.name} died") from None

    def end(self) -> None:
        ray.kill(self.actor)


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
        self, config: RunConfig, run: RunRef, scratch: Path, engines: list[RemoteEngine], graders: list[RemoteGrader]
    ):
        self._config = config
        self._engines = {engine.name: engine for engine in engines}
        self._graders = graders
        store = ObjectStore(run.store_uri, config.store.retry_seconds)
        self._spool = WriteBehind(store, scratch / "spool", config.store.spool_megabytes * 10**6)
        self._journal = Journal(store, run.run_id, config.store.unfinished_seconds)
        self._watch: asyncio.Task[None] | None = None
        self._answers: dict[str, tuple[Collected, list[ray.ObjectRef]]] = {}

    async def start(self) -> None:
        """What an earlier leg generated and could not store is stored first: kept answers name it."""
        await asyncio.to_thread(self._spool.store_leftovers)
        config = self._config
        self._scheduler = RolloutScheduler(
            config.rollout,
            seed=config.seed,
            source=build_source(config.problems, config.seed),
            renderer=build_renderer(config.model),
            engines=list(self._engines.values()),
            graders=self._graders,
            num_iterations=config.iterations,
            greedy_baseline=config.algorithm.samples_greedily,
            finished=await asyncio.to_thread(self._journal.read),
            keep=self._journal.add,
        )
        settle()

    async def collect(self, request: CollectRequest) -> tuple[Collected, list[ray.ObjectRef]]:
        """The receipt, and the trajectories as a reference (in a list, so that Ray does not fetch them for the caller).

        What a collect that failed had generated is taken up by the next one, in this leg or another.
        """
        if request.request_id not in self._answers:
            self._answers = {request.request_id: await self._collect(request)}
        return self._answers[request.request_id]

    async def _collect(self, request: CollectRequest) -> tuple[Collected, list[ray.ObjectRef]]:
        try:
            rollout = await self._scheduler.collect(request, self._config.deadlines.collect)
        except BaseException as error:
            finished = list(self._scheduler.finished.values())
            await self._journal.keep(finished)
            if isinstance(error, RewardUnavailable):
                raise RewardUnavailable(
                    f"collect {request.iteration}: {error}: the {len(finished)} trajectories generated so far are kept, "
                    "and graded once it is back"
                ) from None
            raise
        trajectories = rollout.trajectories
        refuse_if_none_graded(trajectories, f"collect {request.iteration}")
        collected = Collected(
            request=request,
            trajectories=await self._keep(trajectories),
            trace=await asyncio.to_thread(lambda: self._spool.put(encode_trace(rollout.trace), ArtifactKind.TRACE)),
            draws=rollout.draws,
            num_trajectories=len(trajectories),
            num_failed=sum(t.failure is not None for t in trajectories),
            num_tokens=sum(t.num_completion_tokens for t in trajectories),
            metrics=rollout.metrics | metrics.describe(trajectories, request.weights_version),
        )
        self._journal.drop_before(rollout.draws.next)
        return collected, [ray.put(trajectories)]

    async def adopted(self, version: int) -> None:
        """Every engine generates with these weights, and is there: from now on it has to answer."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_engines())
            if self._scheduler.forget_newer(version):
                await self._journal.rewrite(self._scheduler.finished.values())
        self._scheduler.adopted(version)

    async def pause(self, engines: list[str]) -> None:
        await self._scheduler.pause(engines)

    async def resume(self, engines: list[str]) -> None:
        self._scheduler.resume(engines)

    async def welcome(self, engines: list[RemoteEngine], graders: list[RemoteGrader]) -> None:
        """New ones, or successors of some that died."""
        self._engines |= {engine.name: engine for engine in engines}
        self._scheduler.welcome(engines, graders)

    async def committed(self, next_problem: int) -> None:
        """Nothing before this problem is going to be asked for again."""
        await asyncio.to_thread(self._journal.forget_before, next_problem)

    async def evaluate(self, weights_version: int) -> Evaluated:
        num_problems = self._config.evaluation.num_problems
        trajectories = await self._scheduler.evaluate(num_problems, self._config.deadlines.evaluate)
        refuse_if_none_graded(trajectories, f"evaluate version {weights_version}")
        refuse_other_weights(trajectories, weights_version)
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

    async def _watch_engines(self) -> None:
        """One that is alive and does not answer is ended, so that what it has is given to others, as if it had died."""
        while True:
            await asyncio.sleep(self._config.deadlines.heartbeat / 4)
            await asyncio.gather(*(self._end_if_silent(engine) for engine in self._engines.values()))

    async def _end_if_silent(self, engine: RemoteEngine) -> None:
        deadline_s = self._config.deadlines.heartbeat
        try:
            async with asyncio.timeout(deadline_s):
                await engine.answers()
        except TimeoutError:
            log.warning("deadlines.heartbeat: %s did not answer for %.0f s: it is ended", engine.name, deadline_s)
            engine.end()
        except RoleDied:
            pass  # whoever needs it notices
        except Exception:
            log.exception("%s could not be asked whether it is there", engine.name)

    async def wait_until_stored(self, artifacts: list[ArtifactRef]) -> None:
        await asyncio.to_thread(self._spool.wait, artifacts, self._config.deadlines.store)

    async def _keep(self, trajectories: list[Trajectory]) -> ArtifactRef:
        """On disk now, in the store before anything is committed that names them. Waits where the spool is full."""
        return await asyncio.to_thread(lambda: self._spool.put(encode_trajectories(trajectories), ArtifactKind.TRAJECTORIES))


def refuse_if_none_graded(trajectories: list[Trajectory], stage: str) -> None:
    """A batch without a single grade is an outage, not an answer: it must not be kept as the stage's result."""
    failures = [t.failure for t in trajectories if t.failure is not None]
    if len(failures) == len(trajectories):
        raise RollError(f"{stage}: every trajectory failed, the first with: {failures[0].cause}")


def refuse_other_weights(trajectories: list[Trajectory], weights_version: int) -> None:
    """An evaluation speaks of one policy, also while engines take over another."""
    versions = {version for t in trajectories for turn in t.turns for version in turn.weights_versions}
    if versions - {weights_version}:
        raise RollError(f"evaluate version {weights_version}: engines answered with versions {sorted(versions)}")
