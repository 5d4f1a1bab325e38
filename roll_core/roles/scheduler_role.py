"""Rollout scheduler as a Ray actor: batches go to the trainer as object references, and to the store. Also the clients by
which the scheduler calls engines and reward workers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from roll_core.config.run import RunConfig
from roll_core.data.problem_source import build_source
from roll_core.errors import LegInterrupted, RewardUnavailable, RoleDied, RollError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.roles.process import freeze_garbage_collector
from roll_core.roles.waiting import LOST_ROLE_ERRORS
from roll_core.rollout import metrics
from roll_core.rollout.journal import Journal
from roll_core.rollout.renderer import build_renderer
from roll_core.rollout.router import Grade, GradingItem
from roll_core.rollout.scheduler import RolloutScheduler
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import encode_trajectories
from roll_core.store.records.traces import encode_trace
from roll_core.store.write_behind import WriteBehind
from roll_core.types.manifest import Collected, CollectRequest, Evaluated
from roll_core.types.refs import ArtifactKind, ArtifactRef, RunRef
from roll_core.types.trajectory import Trajectory

R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteRole:
    """Client of an actor that is pinged and, if it does not respond, killed. Methods raise RoleDied if it is dead."""

    name: str
    actor: ActorHandle

    async def ping(self) -> None:
        """Return once the actor responds: a reward worker does not while a reward blocks it."""
        try:
            await self.actor.ping.remote()
        except ray.exceptions.RayActorError:
            raise RoleDied(f"{self.name} died") from None

    def kill(self) -> None:
        """Kill the actor."""
        ray.kill(self.actor)


class RemoteEngine(RemoteRole):
    """Client of an engine's actor."""

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        """Generate completions of all requests; yield them in the order they finish, several at a time."""
        try:
            async for finished in self.actor.generate.options(num_returns="streaming").remote(requests):
                yield await finished
        except ray.exceptions.ActorUnavailableError:
            # Its requests go to other engines. Only a successor gets new ones, so an engine that came back would stay idle.
            self.kill()
            raise RoleDied(f"{self.name} could not be reached while generating") from None
        except LOST_ROLE_ERRORS:
            raise RoleDied(f"{self.name} died while generating") from None

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests now; `generate` yields them with the tokens they have."""
        try:
            await self.actor.abort.remote(request_ids)
        except ray.exceptions.RayActorError:
            raise RoleDied(f"{self.name} died while generating") from None


class RemoteGrader(RemoteRole):
    """Client of a reward worker's actor."""

    async def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]:
        """Yield (index of the item, its grade) as items are graded, several at a time."""
        try:
            async for graded in self.actor.grade.options(num_returns="streaming").remote(items):
                yield await graded
        except LOST_ROLE_ERRORS:
            raise RoleDied(f"{self.name} died while grading") from None


class SchedulerRole:
    """Ray actor that holds the rollout scheduler, writes its batches to the store by way of a spool on disk, and pings
    engines and reward workers."""

    def __init__(
        self, config: RunConfig, run: RunRef, scratch: Path, engines: list[RemoteEngine], graders: list[RemoteGrader]
    ):
        self._config = config
        self._engines = {engine.name: engine for engine in engines}
        self._graders = {grader.name: grader for grader in graders}
        store = ObjectStore(run.store_uri, config.store.retry_seconds)
        fresh_seconds = config.store.grace_minutes * 60 / 4
        self._spool = WriteBehind(store, scratch / "spool", config.store.spool_megabytes * 10**6, fresh_seconds)
        self._journal = Journal(store, run.run_id, config.store.unfinished_seconds)
        self._heartbeat_task: asyncio.Task[None] | None = None
        """Pings engines and reward workers in the background; None until weights were first published."""
        self._stage: asyncio.Task[Any] | None = None
        """Collect or evaluation in progress, if any."""
        self._results: dict[str, tuple[Collected, list[ray.ObjectRef]]] = {}
        """Result of the last collect by request id, returned to a repeated request."""

    async def start(self) -> None:
        """Build the scheduler. First store what an earlier leg generated and left in the spool: cached results of tasks name
        it."""
        await asyncio.to_thread(self._spool.store_leftovers)
        config = self._config
        self._scheduler = RolloutScheduler(
            config.rollout,
            seed=config.seed,
            max_positions=config.model.max_positions,
            source=build_source(config.problems, config.seed),
            renderer=build_renderer(config.model),
            engines=list(self._engines.values()),
            graders=list(self._graders.values()),
            num_iterations=config.iterations,
            greedy_baseline=config.algorithm.samples_greedily,
            finished=await asyncio.to_thread(self._journal.read),
            keep=self._journal.add,
        )
        freeze_garbage_collector()

    async def collect(self, request: CollectRequest) -> tuple[Collected, list[ray.ObjectRef]]:
        """Return the receipt of a batch, and a reference to its trajectories. The reference is in a list, so that Ray does
        not fetch the trajectories for the caller.

        Trajectories of a failed collect are kept and used by the next collect, in this leg or another.
        """
        if request.request_id not in self._results:
            self._results = {request.request_id: await self._collect(request)}
        return self._results[request.request_id]

    async def _collect(self, request: CollectRequest) -> tuple[Collected, list[ray.ObjectRef]]:
        try:
            collecting = self._scheduler.collect(request, self._config.deadlines.collect)
            rollout = await self._interruptible(collecting, f"collect {request.iteration}")
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
            trajectories=await self._spool_trajectories(trajectories),
            trace=await asyncio.to_thread(lambda: self._spool.put(encode_trace(rollout.trace), ArtifactKind.TRACE)),
            draws=rollout.draws,
            num_trajectories=len(trajectories),
            num_failed=sum(t.failure is not None for t in trajectories),
            num_tokens=sum(t.num_completion_tokens for t in trajectories),
            metrics=rollout.metrics | metrics.batch_metrics(trajectories, request.weights_version),
        )
        self._journal.drop_before(rollout.draws.next)
        return collected, [ray.put(trajectories)]

    async def stop(self) -> None:
        """Stop generating, and leave the collect or evaluation in progress: it raises LegInterrupted once everything that it
        had finished is in the journal."""
        if self._stage is not None:
            self._stage.cancel()
        await self._scheduler.close()
        await self._journal.keep(self._scheduler.finished.values())

    async def _interruptible(self, work: Coroutine[Any, Any, R], stage: str) -> R:
        """Run the work of a stage until it ends or `stop` is called."""
        self._stage = asyncio.create_task(work)
        try:
            return await self._stage
        except asyncio.CancelledError:
            raise LegInterrupted(f"{stage} was left, because the leg was told to stop") from None
        finally:
            self._stage = None

    async def on_adopted(self, version: int) -> None:
        """Record that every engine generates with this weights version. From the first call on, silent engines and reward
        workers are killed."""
        if self._heartbeat_task is None:
            self._heartbeat_task = asyncio.create_task(self._check_heartbeats())
            if self._scheduler.drop_newer_than(version):
                await self._journal.rewrite(self._scheduler.finished.values())
        self._scheduler.adopted(version)

    async def pause(self, engines: list[str]) -> None:
        """Give these engines nothing more and wait until they are idle; their attempts are resumed later or elsewhere."""
        await self._scheduler.pause(engines)

    async def resume(self, engines: list[str]) -> None:
        """Give these engines requests again."""
        self._scheduler.resume(engines)

    async def add_workers(self, engines: list[RemoteEngine], graders: list[RemoteGrader]) -> None:
        """Add new engines and reward workers, or replacements of dead ones of the same name."""
        self._engines |= {engine.name: engine for engine in engines}
        self._graders |= {grader.name: grader for grader in graders}
        self._scheduler.add_workers(engines, graders)

    async def on_committed(self, next_problem: int) -> None:
        """Drop the journal of the problems before `next_problem`: they are committed and will not be collected again. Look
        once more for the committed artifacts in the store. A failure is logged: no later stage depends on this."""
        try:
            await asyncio.to_thread(self._spool.on_committed)
            await asyncio.to_thread(self._journal.forget_before, next_problem)
        except (RollError, OSError) as error:
            log.warning("after the commit: %s", error)

    async def evaluate(self, weights_version: int) -> Evaluated:
        """Generate greedily on held-out problems; return the accuracy, in which a failed grade counts as wrong. All tokens
        must be of this weights version."""
        num_problems = self._config.evaluation.num_problems
        evaluating = self._scheduler.evaluate(num_problems, self._config.deadlines.evaluate)
        trajectories = await self._interruptible(evaluating, f"evaluate version {weights_version}")
        refuse_if_none_graded(trajectories, f"evaluate version {weights_version}")
        refuse_other_weights(trajectories, weights_version)
        failures = [t.failure for t in trajectories if t.failure is not None]
        if failures:
            log.warning(
                "evaluate version %d: %d of %d answers have no grade and count as wrong, the first: %s",
                *(weights_version, len(failures), len(trajectories), failures[0].cause),
            )
        return Evaluated(
            weights_version=weights_version,
            num_problems=num_problems,
            accuracy=metrics.accuracy(trajectories),
            trajectories=await self._spool_trajectories(trajectories),
            metrics={
                "accuracy/held_out": metrics.accuracy(trajectories),
                "accuracy/held_out_failed": float(len(failures)),
            },
        )

    async def _check_heartbeats(self) -> None:
        """Ping all engines and reward workers, four times per `deadlines.heartbeat`, for the life of the leg."""
        while True:
            await asyncio.sleep(self._config.deadlines.heartbeat / 4)
            workers: list[RemoteRole] = [*self._engines.values(), *self._graders.values()]
            await asyncio.gather(*(self._kill_if_silent(worker) for worker in workers))

    async def _kill_if_silent(self, worker: RemoteRole) -> None:
        """Kill an engine or reward worker that does not reply within `deadlines.heartbeat` seconds. Its work then goes to
        others, as if it had died."""
        deadline_s = self._config.deadlines.heartbeat
        try:
            async with asyncio.timeout(deadline_s):
                await worker.ping()
        except TimeoutError:
            log.warning("deadlines.heartbeat: %s did not answer for %.0f s: it is ended", worker.name, deadline_s)
            worker.kill()
        except RoleDied:
            pass  # the next call to it raises RoleDied, too
        except Exception:
            log.exception("%s could not be asked whether it is there", worker.name)

    async def wait_until_stored(self, artifacts: list[ArtifactRef]) -> None:
        """Wait until these artifacts are in the store, at most `deadlines.store` seconds for each."""
        await asyncio.to_thread(self._spool.wait, artifacts, self._config.deadlines.store)

    async def _spool_trajectories(self, trajectories: list[Trajectory]) -> ArtifactRef:
        """Write trajectories to the spool on disk; return their reference. They are in the store before a manifest names
        them. Waits while the spool is full."""
        return await asyncio.to_thread(lambda: self._spool.put(encode_trajectories(trajectories), ArtifactKind.TRAJECTORIES))


def refuse_if_none_graded(trajectories: list[Trajectory], stage: str) -> None:
    """Raise RollError if no trajectory was graded: that is an outage and must not be cached as the stage's result."""
    failures = [t.failure for t in trajectories if t.failure is not None]
    if len(failures) == len(trajectories):
        raise RollError(f"{stage}: every trajectory failed, the first with: {failures[0].cause}")


def refuse_other_weights(trajectories: list[Trajectory], weights_version: int) -> None:
    """Raise RollError if a token was sampled by another weights version: an evaluation measures one policy, even while
    engines adopt another."""
    versions = {version for t in trajectories for turn in t.turns for version in turn.weights_versions}
    if versions - {weights_version}:
        raise RollError(f"evaluate version {weights_version}: engines answered with versions {sorted(versions)}")
