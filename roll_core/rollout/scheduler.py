"""Rollout scheduler: turns requests for batches into graded trajectories.

`lifecycle.py` decides, `router.py` calls engines and graders, and `stream.py` carries messages between the two. The stream
also works between two requests, as far ahead as `rollout.async_ratio` allows. The scheduler reads and writes no files:
finished trajectories go to `finished` and to the caller's `keep`, so that a failure loses nothing that was generated.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roll_core.config.rollout import RolloutConfig
from roll_core.data.problem_source import ProblemSource
from roll_core.errors import DeadlineExceeded
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.filter import build_filter
from roll_core.rollout.lifecycle import AttemptId, Lifecycle, StreamSpec
from roll_core.rollout.meters import Meters
from roll_core.rollout.metrics import page_metrics
from roll_core.rollout.posing import PromptRoom, pose
from roll_core.rollout.renderer import Renderer
from roll_core.rollout.router import DeadRoles, EngineClient, GraderClient, GraderPool, RolloutEvent, Router
from roll_core.rollout.stream import Attempt, Batch, Finished, Keep, Partial, Stream, discard
from roll_core.seeds import derive_seed
from roll_core.types.manifest import CollectRequest, Draws, Metrics
from roll_core.types.trace import AttemptTrace
from roll_core.types.trajectory import GREEDY_ATTEMPT, Failure, Problem, Trajectory


@dataclass(frozen=True)
class Rollout:
    """Result of a collect: the batch in order, the outcome of every draw, metrics, and the trace of every attempt."""

    trajectories: list[Trajectory]
    draws: Draws
    metrics: Metrics
    trace: list[AttemptTrace]


class RolloutScheduler:
    """Scheduler of a leg: `collect` returns the next batch, and `adopted` reports new weights.

    Engines can be paused, all or some, while the trainer needs their devices.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        seed: int,
        max_positions: int,
        source: ProblemSource,
        renderer: Renderer,
        engines: Sequence[EngineClient],
        graders: Sequence[GraderClient],
        num_iterations: int = 1,
        greedy_baseline: bool = False,
        finished: Finished | None = None,
        keep: Keep = discard,
    ):
        """Create the scheduler of a leg.

        `max_positions` is the model's longest sequence, in tokens. `finished` has the trajectories of earlier legs that no
        batch has consumed. `keep` gets every trajectory when it is generated to its end, and again when it is graded.
        """
        self._config = config
        self._seed = seed
        self._room = PromptRoom(max_positions, config.max_new_tokens)
        self._source = source
        self._renderer = renderer
        self._engines = engines
        self._graders = graders
        self._num_iterations = num_iterations
        self._greedy_baseline = greedy_baseline
        self._dead_roles = DeadRoles()
        self._paused: set[str] = set()
        self.finished = {} if finished is None else finished
        """Trajectories that no batch has consumed. They survive a failed collect: the next one reuses them."""
        self._partial: Partial = {}
        """Interrupted attempts to resume, kept for the next collect as well."""
        self._keep = keep
        self._stream: Stream | None = None

    async def collect(self, request: CollectRequest, deadline_s: float) -> Rollout:
        """Collect the number of groups that the request asks for, from its first problem on.

        Every attempt is graded or carries its failure. Without redundancy and lookahead the result does not depend on
        timing, and a repeated collect returns the same. With redundancy it depends on which attempts finish first; with
        lookahead, on which weights sampled which token. The stored result is then the only record of it.
        """
        stream = await self._stream_for(request)
        try:
            stream.adopted(request.weights_version)
            batch = await self._next_batch(stream, deadline_s, "collect")
        except BaseException:
            await self.close()
            raise
        page = batch.page
        return Rollout(
            trajectories=[replace(t, group=t.group - page.first) for t in batch.trajectories],
            draws=Draws(first=page.first, outcomes=page.outcomes),
            metrics=page_metrics(page) | stream.read_meters(),
            trace=batch.trace,
        )

    async def evaluate(self, num_problems: int, deadline_s: float) -> list[Trajectory]:
        """Make one greedy attempt at each of the first `num_problems` held-out problems. The attempt at a problem that
        cannot be posed is a failed one."""
        problems = self._source.held_out(num_problems)

        def make_attempts(attempt_ids: Sequence[AttemptId]) -> list[Attempt]:
            group = attempt_ids[0][0]
            return self._build_attempts(problems[group], attempt_ids, 0.0, group, "held-out/")

        spec = StreamSpec(num_problems, group_size=1, replaces_unposed=False)
        stream = self._open_stream(spec, 0, 0, make_attempts, {}, {}, discard)
        try:
            return (await self._next_batch(stream, deadline_s, "evaluate")).trajectories
        finally:
            await stream.close()

    def drop_newer_than(self, version: int) -> int:
        """Drop finished trajectories sampled by weights newer than `version`; return how many there were.

        Called when a leg begins: an earlier leg had newer weights that were never committed.
        """
        newer = [attempt_id for attempt_id, t in self.finished.items() if max(_versions(t), default=0) > version]
        for attempt_id in newer:
            del self.finished[attempt_id]
        return len(newer)

    def adopted(self, version: int) -> None:
        """Report that every engine has this weights version: groups drawn from now on are sampled by it."""
        if self._stream is not None and self._config.async_ratio > 0:
            self._stream.adopted(version)

    async def pause(self, engines: Sequence[str]) -> None:
        """Give these engines nothing more, and wait until they are idle.

        Their attempts are resumed from where they are, elsewhere or later; under `in_flight: finish` they are waited for.
        """
        self._paused |= set(engines)
        if self._stream is not None:
            await self._stream.suspend(engines, self._config.in_flight)

    def resume(self, engines: Sequence[str]) -> None:
        """Give these engines requests again."""
        self._paused -= set(engines)
        if self._stream is not None:
            self._stream.resume(engines)

    def add_workers(self, engines: Sequence[EngineClient], graders: Sequence[GraderClient]) -> None:
        """Add new engines and graders, or successors of dead ones of the same name."""
        self._engines = list(({e.name: e for e in self._engines} | {e.name: e for e in engines}).values())
        self._graders = list(({g.name: g for g in self._graders} | {g.name: g for g in graders}).values())
        for name in [*(engine.name for engine in engines), *(grader.name for grader in graders)]:
            self._dead_roles.causes.pop(name, None)
        if self._stream is not None:
            self._stream.add_workers(engines, graders)

    async def close(self) -> None:
        """Stop what is under way. Finished trajectories stay in `finished`."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.close()

    async def _stream_for(self, request: CollectRequest) -> Stream:
        """Return the current stream if it is healthy and positioned at the request; open a new one otherwise."""
        if self._stream is not None:
            if (
                self._stream.lifecycle.position == (request.first_problem, request.weights_version)
                and not self._stream.failures
            ):
                return self._stream
            await self.close()
        self._stream = self._open_for_training(request)
        return self._stream

    def _open_for_training(self, request: CollectRequest) -> Stream:
        """Open the training stream that begins at the request."""
        config = self._config
        spec = StreamSpec(
            num_groups=request.num_groups,
            group_size=config.group_size,
            num_batches=max(1, self._num_iterations - request.iteration + 1),
            ahead=config.async_ratio,
            greedy_baseline=self._greedy_baseline,
            redundant_groups=config.redundant_groups,
            redundant_attempts=config.redundant_attempts,
            max_draws=int(config.max_draws * request.num_groups) + config.redundant_groups,
            is_useful=None if config.filter is None else build_filter(config.filter),
        )
        self._drop_stale(request, spec)

        def make_attempts(attempt_ids: Sequence[AttemptId]) -> list[Attempt]:
            index = attempt_ids[0][0]
            return self._build_attempts(self._source.problem(index), attempt_ids, config.temperature, index)

        return self._open_stream(
            spec, request.first_problem, request.weights_version, make_attempts, self.finished, self._partial, self._keep
        )

    def _drop_stale(self, request: CollectRequest, spec: StreamSpec) -> None:
        """Drop kept trajectories whose weights versions do not fit the batch they would belong to.

        An earlier leg sampled them in an iteration that was not committed, or while the config allowed more staleness.
        """
        first, version = request.first_problem, request.weights_version
        for kept in (self.finished, self._partial):
            for attempt_id in list(kept):
                trains = version + (attempt_id[0] - first) // spec.num_groups
                versions = _versions(kept[attempt_id])
                fits = trains - spec.max_staleness <= min(versions, default=trains) and max(versions, default=0) <= version
                if attempt_id[0] < first or not fits:
                    del kept[attempt_id]

    def _build_attempts(
        self, problem: Problem, attempt_ids: Sequence[AttemptId], temperature: float, index: int, prefix: str = ""
    ) -> list[Attempt]:
        """Build the attempts at one problem. Their seeds depend on `index`, the position in the stream, so that a problem
        that comes up again is sampled anew."""
        posed = pose(problem, self._renderer, self._room)
        prompt_ids, failure = ((), posed) if isinstance(posed, Failure) else (posed, None)
        return [
            Attempt(
                problem,
                (group, number),
                GenerationRequest(
                    request_id=f"{prefix}{group}/{number}",
                    prompt_ids=prompt_ids,
                    max_new_tokens=self._config.max_new_tokens,
                    temperature=0.0 if number == GREEDY_ATTEMPT else temperature,
                    stop_token_ids=self._renderer.stop_token_ids,
                    seed=derive_seed(self._seed, "attempt", index, number),
                ),
                failure,
            )
            for group, number in attempt_ids
        ]

    def _open_stream(
        self,
        spec: StreamSpec,
        first: int,
        version: int,
        make_attempts: Callable[[Sequence[AttemptId]], list[Attempt]],
        finished: Finished,
        partial: Partial,
        keep: Keep,
    ) -> Stream:
        events: asyncio.Queue[RolloutEvent] = asyncio.Queue()
        router = Router(self._engines, self._config, self._dead_roles, events.put_nowait)
        router.suspend(self._paused)
        pool = GraderPool(self._graders, self._dead_roles, events.put_nowait)
        lifecycle = Lifecycle(spec, first, version, asyncio.get_running_loop().time())
        meters = Meters(list(router.load), self._config.slots_per_engine, asyncio.get_running_loop().time())
        return Stream(lifecycle, make_attempts, finished, partial, router, pool, events, self._renderer, keep, meters)

    async def _next_batch(self, stream: Stream, deadline_s: float, stage: str) -> Batch:
        try:
            async with asyncio.timeout(deadline_s):
                return await stream.next_batch()
        except TimeoutError:
            total = stream.lifecycle.num_attempts
            late = ", ".join(f"{name} ({left} of {total} attempts)" for name, left in stream.router.load.items() if left)
            raise DeadlineExceeded(
                f"deadlines.{stage}: after {deadline_s:.0f} s still waiting for {late or 'the reward workers'}"
            ) from None


def _versions(generated: Trajectory | Completion) -> set[int]:
    """Weights versions that sampled the tokens."""
    if isinstance(generated, Completion):
        return set(generated.weights_versions)
    return {version for turn in generated.turns for version in turn.weights_versions}
