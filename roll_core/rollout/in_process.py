"""Clients of engines and graders that live in this process: what tests and benchmarks use where a run has Ray between."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.types.trajectory import Failure, Problem, Score, Trajectory

if TYPE_CHECKING:
    from roll_core.inference.base import InferenceEngine


class Grades(Protocol):
    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure]: ...


@dataclass(frozen=True)
class LocalEngine:
    name: str
    engine: "InferenceEngine"

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        yield list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))


@dataclass(frozen=True)
class LocalGrader:
    name: str
    grader: Grades

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure]:
        return await self.grader.grade(items)
