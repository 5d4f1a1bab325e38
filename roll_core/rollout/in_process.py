"""Rollout scheduler with one engine and one grader in this process. Tests and benchmarks use it; a run has Ray actors."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from roll_core.concurrency import as_they_finish
from roll_core.config.run import RunConfig
from roll_core.data.problem_source import build_source
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.renderer import build_renderer
from roll_core.rollout.router import Grade, GradingItem
from roll_core.rollout.scheduler import RolloutScheduler

if TYPE_CHECKING:
    from roll_core.inference.base import InferenceEngine


class Grader(Protocol):
    """Protocol of a grader in this process, such as `RewardRole`."""

    def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]: ...


@dataclass(frozen=True)
class LocalEngine:
    """Adapter of an inference engine in this process to `EngineClient`."""

    name: str
    engine: "InferenceEngine"

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        async for completions in as_they_finish(self.engine.generate(request) for request in requests):
            yield completions

    async def abort(self, request_ids: list[str]) -> None:
        await self.engine.abort(*request_ids)


@dataclass(frozen=True)
class LocalGrader:
    """Adapter of a grader in this process to `GraderClient`."""

    name: str
    grader: Grader

    def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]:
        return self.grader.grade(items)


def scheduler_in_process(config: RunConfig, engine: "InferenceEngine", grader: Grader) -> RolloutScheduler:
    """Build the rollout scheduler of a run's config over one engine and one grader."""
    return RolloutScheduler(
        config.rollout,
        seed=config.seed,
        max_positions=config.model.max_positions,
        source=build_source(config.problems, config.seed),
        renderer=build_renderer(config.model),
        engines=[LocalEngine("engine", engine)],
        graders=[LocalGrader("grader", grader)],
        greedy_baseline=config.algorithm.samples_greedily,
    )
