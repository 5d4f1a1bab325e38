"""Launcher protocol: how a leg gets its machines.

A `Launcher` turns a `LegRequest` into a `LegJob`, and a finished job reports a `JobEnd`. Implemented by `local.py` (a
process on this machine) and `slurm.py` (a SLURM job); used by `tasks/legs.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll_core.types.leg import LegAllocation, LegEnding

LegFunction = Callable[[LegAllocation], Any]
"""Function that runs a leg in the driver's process. Its return value becomes `JobEnd.result`."""


@dataclass(frozen=True)
class LegRequest:
    """Resources that a leg requests.

    Example: LegRequest(name="quickstart-3.1b4f77d0.leg-2", folder=Path("/shared/quickstart-3/leg-2"), nodes=2,
    devices_per_node=8, gpus_per_node=8, time_limit_minutes=240, exclude=("gpu-17",))
    """

    name: str
    """Name of the job. `Launcher.find` looks it up."""
    folder: Path
    """Folder for the job's logs and result, on a disk that all nodes reach."""
    nodes: int
    devices_per_node: int
    gpus_per_node: int
    time_limit_minutes: int
    exclude: tuple[str, ...] = ()
    """Names of nodes that the job must not run on."""
    avoid: tuple[str, ...] = ()
    """Nodes that the job should not run on if there are enough others, in SLURM's notation."""


@dataclass(frozen=True)
class JobEnd:
    """End of a job as the launcher sees it. The leg's own result, if there is one, is more precise."""

    ending: LegEnding | None
    """Reason of the end; None if the launcher does not know it."""
    result: Any | None
    """Return value of the leg function; None if the leg died before it returned."""
    cause: str
    """Explanation for a person, in one sentence."""
    lost_nodes: tuple[str, ...] = ()
    """Names of nodes that failed."""
    nodes: str = ""
    """Nodes that the job ran on, in SLURM's notation; empty if they are unknown, and for a local job."""


class LegJob(Protocol):
    """Submitted job that runs a leg."""

    job_id: str
    log: Path
    """Path of the output of the leg's process."""
    poll_s: float
    """Seconds to wait between two calls of `has_ended`."""

    def describe(self) -> str:
        """Describe the job's state in a few words. Example: waits for 25 min (Priority)"""
        ...

    def has_ended(self) -> bool:
        """True if the job has ended, successfully or not."""
        ...

    @property
    def obstacle(self) -> str:
        """Sentence about what a person must do so that the job can run, at the last call of `has_ended`; "" if nothing."""
        ...

    @property
    def nodes(self) -> str:
        """Node list of the running job, in SLURM's notation; "" while it is pending, and for a local job."""
        ...

    def end(self) -> JobEnd:
        """Return how the job ended. Call it only after `has_ended` returned True."""
        ...

    def cancel(self) -> None:
        """Request the end of the job. No effect on a job that has ended."""
        ...


class Launcher(Protocol):
    """Backend that submits legs as jobs."""

    def submit(self, request: LegRequest, leg: LegFunction) -> LegJob:
        """Submit a job that runs `leg` on the requested resources."""
        ...

    def find(self, prefix: str) -> dict[str, str]:
        """Map name to job id of the pending and running jobs whose names start with `prefix`, submitted by any process."""
        ...

    def attach(self, job_id: str, folder: Path) -> LegJob:
        """Return the handle of a job that another process may have submitted. `folder` is its request's folder."""
        ...
