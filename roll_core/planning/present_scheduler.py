"""The synchronous rollout scheduler behind the interface of one that generates ahead, with a trace of what it did."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from roll_core.config.rollout import RolloutConfig
from roll_core.data.problem_source import ProblemSource
from roll_core.errors import UserError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.lifecycle import AttemptLife, GroupLife, Lifecycle, State
from roll_core.rollout.renderer import Renderer
from roll_core.rollout.router import EngineClient, GraderClient
from roll_core.rollout.scheduler import Rollout, RolloutScheduler
from roll_core.types.manifest import CollectRequest, DrawOutcome, Draws
from roll_core.types.trace import AttemptTrace, Fate, Span


@dataclass(frozen=True)
class TracedRollout:
    draws: Draws
    trace: list[AttemptTrace]


class PresentScheduler:
    def __init__(
        self,
        config: RolloutConfig,
        *,
        num_iterations: int,  # noqa: ARG002
        seed: int,
        source: ProblemSource,
        renderer: Renderer,
        engines: Sequence[EngineClient],
        graders: Sequence[GraderClient],
        greedy_baseline: bool,
    ):
        if config.async_ratio:
            raise UserError("rollout.async_ratio: only 0 can be simulated")
        self._engines = [_Noting(engine.name, engine) for engine in engines]
        self._scheduler = _Remembering(
            config,
            seed=seed,
            source=source,
            renderer=renderer,
            engines=self._engines,
            graders=graders,
            greedy_baseline=greedy_baseline,
        )

    async def collect(self, request: CollectRequest, deadline_s: float) -> TracedRollout:
        rollout: Rollout = await self._scheduler.collect(request, deadline_s)
        engine_of = {name: engine.name for engine in self._engines for name in engine.noted}
        lives = [(group, life) for group in self._scheduler.lives.groups for life in group.attempts]
        consumed_at = max(life.history[-1][1] for _, life in lives)
        trace = [_trace(request, engine_of, group, life, consumed_at) for group, life in lives]
        for engine in self._engines:
            engine.noted.clear()
        return TracedRollout(rollout.draws, trace)

    def adopted(self, version: int) -> None:
        pass

    async def pause(self, names: Sequence[str]) -> None:
        pass

    def resume(self, names: Sequence[str]) -> None:
        pass

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Noting:
    name: str
    engine: EngineClient
    noted: set[str] = field(default_factory=set)

    def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        self.noted.update(request.request_id for request in requests)
        return self.engine.generate(requests)

    async def abort(self, request_ids: list[str]) -> None:
        await self.engine.abort(request_ids)


class _Remembering(RolloutScheduler):
    lives: Lifecycle

    async def _run(self, *stage: Any) -> Lifecycle:
        self.lives = await super()._run(*stage)
        return self.lives


def _trace(
    request: CollectRequest, engine_of: dict[str, str], group: GroupLife, life: AttemptLife, consumed_at: float
) -> AttemptTrace:
    at: dict[State, float] = dict(life.history)
    with_engine = (State.GENERATING, State.ABORTING)
    spans = [(begin, end) for (state, begin), (_, end) in pairwise(life.history) if state in with_engine]
    place, number = life.place
    return AttemptTrace(
        problem=request.first_problem + place,
        attempt=number,
        fate=_fate(group, life),
        num_prompt_tokens=1,
        oldest_version=request.weights_version if life.num_tokens else None,
        drawn_at=life.history[0][1],
        spans=(Span(engine_of[f"{place}/{number}"], spans[0][0], spans[-1][1], life.num_tokens),) if spans else (),
        grading_at=at.get(State.GRADING),
        graded_at=at.get(State.GRADED),
        consumed_at=consumed_at,
    )


def _fate(group: GroupLife, life: AttemptLife) -> Fate:
    if life.state is State.ABORTED:
        return Fate.ABORTED
    if group.outcome is DrawOutcome.FILTERED:
        return Fate.FILTERED
    return Fate.TRAINED if life.state is State.GRADED else Fate.FAILED
