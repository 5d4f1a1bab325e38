"""Turns requests for batches into graded trajectories: every attempt generated, graded the moment it ends, put in its group.

Who does what: `lifecycle.py` decides, `router.py` talks to engines and graders, and `stream.py` carries messages between the
two, also while nobody waits for a batch, as far ahead as `rollout.async_ratio` allows. Knows no files: what is finished is
put where the caller can see it, so that a failure costs nothing generated.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roll_core.config.rollout import RolloutConfig
from roll_core.data.problem_source import ProblemSource
from roll_core.errors import DeadlineExceeded
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.filter import build_filter
from roll_core.rollout.lifecycle import Lifecycle, Place, StreamSpec
from roll_core.rollout.meters import Meters
from roll_core.rollout.metrics import describe_page
from roll_core.rollout.renderer import Renderer
from roll_core.rollout.router import DeadRoles, EngineClient, GraderClient, GraderPool, RolloutEvent, Router
from roll_core.rollout.stream import Attempt, Batch, Finished, Keep, Partial, Stream, nobody
from roll_core.seeds import derive_seed
from roll_core.types.manifest import CollectRequest, Draws, Metrics
from roll_core.types.trace import AttemptTrace
from roll_core.types.trajectory import GREEDY_ATTEMPT, Problem, Trajectory


@dataclass(frozen=True)
class Rollout:
    """What a collect comes to: the batch, in order; what became of every problem drawn; what it took, and when."""

    trajectories: list[Trajectory]
    draws: Draws
    metrics: Metrics
    trace: list[AttemptTrace]


class RolloutScheduler:
    """Batch after batch: `collect` answers the next one, and `adopted` says that there are new weights.

    Engines may be paused, all or some, while somebody else needs their devices.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        seed: int,
        source: ProblemSource,
        renderer: Renderer,
        engines: Sequence[EngineClient],
        graders: Sequence[GraderClient],
        num_iterations: int = 1,
        greedy_baseline: bool = False,
        finished: Finished | None = None,
        keep: Keep = nobody,
    ):
        """`finished` is what earlier legs had and no batch has used up; `keep` gets every trajectory that was generated to
        its end, and again when it is graded."""
        self._config = config
        self._seed = seed
        self._source = source
        self._renderer = renderer
        self._engines = engines
        self._graders = graders
        self._num_iterations = num_iterations
        self._greedy_baseline = greedy_baseline
        self._deaths = DeadRoles()
        self._paused: set[str] = set()
        self.finished = {} if finished is None else finished
        """What no batch has used up, kept when a collect fails: the next one does not generate it again."""
        self._partial: Partial = {}
        self._keep = keep
        self._stream: Stream | None = None

    async def collect(self, request: CollectRequest, deadline_s: float) -> Rollout:
        """As many groups as a request asks for, from its first problem on, every attempt graded or carrying its failure.

        Without redundancy and without working ahead the answer is the same whatever the timing, however often it is asked.
        Otherwise it depends on timing: on who finished first, or on which weights made which token. An answer that was
        stored is what happened, and is not collected again.
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
            metrics=describe_page(page) | stream.read_meters(),
            trace=batch.trace,
        )

    async def evaluate(self, num_problems: int, deadline_s: float) -> list[Trajectory]:
        """One greedy attempt at each held-out problem."""
        problems = self._source.held_out(num_problems)

        def attempts(places: Sequence[Place]) -> list[Attempt]:
            group = places[0][0]
            return self._attempts(problems[group], places, 0.0, group, "held-out/")

        stream = self._open(StreamSpec(num_problems, group_size=1), 0, 0, attempts, {}, {}, nobody)
        try:
            return (await self._next_batch(stream, deadline_s, "evaluate")).trajectories
        finally:
            await stream.close()

    def forget_newer(self, version: int) -> int:
        """A new leg begins with these weights: what an earlier one made by newer ones, which were never committed, is made
        again. Says how many there were."""
        newer = [place for place, t in self.finished.items() if max(_versions(t), default=0) > version]
        for place in newer:
            del self.finished[place]
        return len(newer)

    def adopted(self, version: int) -> None:
        """Every engine has these weights: whatever is drawn from now on is by them."""
        if self._stream is not None and self._config.async_ratio > 0:
            self._stream.adopted(version)

    async def pause(self, engines: Sequence[str]) -> None:
        """Give these nothing to do, and wait until they have nothing: what they had is resumed from where it was, elsewhere
        or later; under `in_flight: finish` it is waited for."""
        self._paused |= set(engines)
        if self._stream is not None:
            await self._stream.withdraw(engines, self._config.in_flight)

    def resume(self, engines: Sequence[str]) -> None:
        self._paused -= set(engines)
        if self._stream is not None:
            self._stream.give_back(engines)

    def welcome(self, engines: Sequence[EngineClient], graders: Sequence[GraderClient]) -> None:
        """New ones, or successors of some of the same name that died."""
        self._engines = list(({e.name: e for e in self._engines} | {e.name: e for e in engines}).values())
        self._graders = list(({g.name: g for g in self._graders} | {g.name: g for g in graders}).values())
        for name in [*(engine.name for engine in engines), *(grader.name for grader in graders)]:
            self._deaths.sentences.pop(name, None)
        if self._stream is not None:
            self._stream.welcome(engines, graders)

    async def close(self) -> None:
        """Stop what is under way. What is finished stays."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.close()

    async def _stream_for(self, request: CollectRequest) -> Stream:
        """The one that is under way, if it stands where the request wants to go on; else a new one."""
        if self._stream is not None:
            if (
                self._stream.lives.stands_at == (request.first_problem, request.weights_version)
                and not self._stream.failures
            ):
                return self._stream
            await self.close()
        self._stream = self._begin(request)
        return self._stream

    def _begin(self, request: CollectRequest) -> Stream:
        config = self._config
        terms = StreamSpec(
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
        self._forget_unfit(request, terms)

        def attempts(places: Sequence[Place]) -> list[Attempt]:
            index = places[0][0]
            return self._attempts(self._source.problem(index), places, config.temperature, index)

        return self._open(
            terms, request.first_problem, request.weights_version, attempts, self.finished, self._partial, self._keep
        )

    def _forget_unfit(self, request: CollectRequest, terms: StreamSpec) -> None:
        """What was finished, but not by weights that the batch it belongs to may be made by. An earlier leg had it: of an
        iteration that was not committed, or while the config allowed more staleness."""
        first, version = request.first_problem, request.weights_version
        for kept in (self.finished, self._partial):
            for place in list(kept):
                trains = version + (place[0] - first) // terms.num_groups
                versions = _versions(kept[place])
                fits = trains - terms.max_staleness <= min(versions, default=trains) and max(versions, default=0) <= version
                if place[0] < first or not fits:
                    del kept[place]

    def _attempts(
        self, problem: Problem, places: Sequence[Place], temperature: float, index: int, prefix: str = ""
    ) -> list[Attempt]:
        """Attempts at the problem at an index of the stream; a problem that comes up again is attempted anew."""
        prompt_ids = self._renderer.prompt(problem.messages)
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
            )
            for group, number in places
        ]

    def _open(
        self,
        terms: StreamSpec,
        first: int,
        version: int,
        attempts: Callable[[Sequence[Place]], list[Attempt]],
        finished: Finished,
        partial: Partial,
        keep: Keep,
    ) -> Stream:
        events: asyncio.Queue[RolloutEvent] = asyncio.Queue()
        router = Router(self._engines, self._config, self._deaths, events.put_nowait)
        router.withdraw(self._paused)
        pool = GraderPool(self._graders, self._deaths, events.put_nowait)
        lives = Lifecycle(terms, first, version, asyncio.get_running_loop().time())
        meters = Meters(list(router.load), self._config.slots_per_engine, asyncio.get_running_loop().time())
        return Stream(lives, attempts, finished, partial, router, pool, events, self._renderer, keep, meters)

    async def _next_batch(self, stream: Stream, deadline_s: float, stage: str) -> Batch:
        try:
            async with asyncio.timeout(deadline_s):
                return await stream.next_batch()
        except TimeoutError:
            total = stream.lives.num_attempts
            late = ", ".join(f"{name} ({left} of {total} attempts)" for name, left in stream.router.load.items() if left)
            raise DeadlineExceeded(
                f"deadlines.{stage}: after {deadline_s:.0f} s still waiting for {late or 'the reward workers'}"
            ) from None


def _versions(made: Trajectory | Completion) -> set[int]:
    if isinstance(made, Completion):
        return set(made.weights_versions)
    return {version for turn in made.turns for version in turn.weights_versions}
