"""What a source of problems must answer, and which source a config means.

A source is a pure function of its config and an index, so that a cursor (one number) is all a run has to remember.
"""

from typing import Protocol

from roll_core.config.problems import (
    ArithmeticProblems,
    DatasetProblems,
    JsonlProblems,
    ProblemsConfig,
    ReasoningGymProblems,
)
from roll_core.data.arithmetic import ArithmeticSource
from roll_core.data.dataset import DatasetSource
from roll_core.data.jsonl import JsonlSource
from roll_core.data.reasoning_gym import ReasoningGymSource
from roll_core.types.trajectory import Demonstration, Problem


class ProblemSource(Protocol):
    @property
    def domains(self) -> frozenset[str]:
        """Every domain a training problem may be of."""
        ...

    def problem(self, index: int) -> Problem:
        """The training problem at a position of the endless stream."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """The first `count` evaluation problems; the same ones every time, none of them ever trained on."""
        ...

    def demonstration(self, index: int) -> Demonstration:
        """A well-formed completion to imitate during the warm start."""
        ...


def build_source(config: ProblemsConfig, seed: int) -> ProblemSource:
    match config:
        case ArithmeticProblems():
            return ArithmeticSource(config, seed)
        case JsonlProblems():
            return JsonlSource(config, seed)
        case DatasetProblems():
            return DatasetSource(config, seed)
        case ReasoningGymProblems():
            return ReasoningGymSource(config, seed)
