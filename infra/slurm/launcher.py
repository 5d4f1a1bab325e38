"""How a leg gets its machines: what it asks for, who launches the job that carries it, and what became of that job."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll_core.types.leg import LegAllocation, LegEnding

LegFunction = Callable[[LegAllocation], Any]
"""A leg: what runs in its driver's process. What it answers reaches whoever waits for the job."""


@dataclass(frozen=True)
class LegRequest:
    """What a leg asks for.

    Example: LegRequest(name="quickstart-3.1b4f77d0.leg-2", folder=Path("/shared/quickstart-3/leg-2"), nodes=2,
    devices_per_node=8, gpus_per_node=8, time_limit_minutes=240, exclude=("gpu-17",))
    """

    name: str
    """Of the job, by which it is found again."""
    folder: Path
    """For logs and the answer, on a disk that all nodes reach."""
    nodes: int
    devices_per_node: int
    gpus_per_node: int
    time_limit_minutes: int
    exclude: tuple[str, ...] = ()
    """Nodes that this leg should not be given."""


@dataclass(frozen=True)
class JobEnd:
    """How a job ended, as the launcher sees it; the answer of the leg, if it gave one, knows more."""

    ending: LegEnding | None
    """null where only the leg can tell."""
    answer: Any | None
    cause: str
    lost_nodes: tuple[str, ...] = ()


class LegJob(Protocol):
    job_id: str
    log: Path
    poll_s: float
    """How often `has_ended` may be asked."""

    def describe(self) -> str:
        """What it is doing, or waiting for."""
        ...

    def has_ended(self) -> bool: ...
    @property
    def nodes(self) -> str:
        """Of an allocation, while the job runs there; empty otherwise."""
        ...

    def end(self) -> JobEnd:
        """How it ended; to be asked once it has."""
        ...

    def cancel(self) -> None:
        """Ask for its end. A job that has ended stays as it is."""
        ...


class Launcher(Protocol):
    def submit(self, request: LegRequest, leg: LegFunction) -> LegJob: ...
    def find(self, prefix: str) -> dict[str, str]:
        """Jobs that wait or run and whose names begin so, whoever submitted them: their ids by name."""
        ...

    def attach(self, job_id: str, folder: Path) -> LegJob:
        """A job that was submitted before, by somebody who may be gone."""
        ...
