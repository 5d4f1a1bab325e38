"""Protocol of problem sources, and the source that a config selects.

A source is a pure function of its config and an index, so a cursor (one number) is all that a run has to remember.
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
    """Endless stream of training problems by index, with a separate evaluation set."""

    @property
    def domains(self) -> frozenset[str]:
        """All domains that training problems can have."""
        ...

    def problem(self, index: int) -> Problem:
        """Return the training problem at a position of the endless stream."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """Return the first `count` evaluation problems: always the same, and never trained on."""
        ...

    def demonstration(self, index: int) -> Demonstration:
        """Return a problem with a well-formed completion to imitate during the warm start."""
        ...


def build_source(config: ProblemsConfig, seed: int) -> ProblemSource:
    """Build the problem source that a config selects."""
    match config:
        case ArithmeticProblems():
            return ArithmeticSource(config, seed)
        case JsonlProblems():
            return JsonlSource(config, seed)
        case DatasetProblems():
            return DatasetSource(config, seed)
        case ReasoningGymProblems():
            return ReasoningGymSource(config, seed)
