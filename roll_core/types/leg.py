"""Types about legs: the allocation a leg runs in, and how it ended. Shared by launchers, flows and the leg itself."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from roll_core.errors import FailureClass
from roll_core.types.refs import Record


class LegEnding(StrEnum):
    """Reason why a leg ended. `flows/rlvr.py` decides what follows from each."""

    FINISHED = "finished"
    """The run's last iteration is committed."""
    WALLTIME = "walltime"
    """The allocation's time limit was reached, or nearly so."""
    PREEMPTED = "preempted"
    """The leg was asked to end before its time limit."""
    NODE_FAIL = "node_fail"
    """A node failed, or Ray on it."""
    OUT_OF_MEMORY = "out_of_memory"
    """The leg used more memory than its allocation has."""
    CANCELLED = "cancelled"
    """A user or an administrator cancelled the leg's job."""
    FENCED = "fenced"
    """Another leg owns the run. This leg must not continue."""
    FAILED = "failed"
    """Any other failure. `LegEnded.failure` says whether it is transient."""


class LegEnded(Record):
    """Receipt of a leg: why it ended and how far the run is.

    Example: LegEnded(run_id="quickstart-3", leg=1, ending="finished", last_iteration=40)
    """

    run_id: str
    leg: int
    ending: LegEnding
    last_iteration: int | None
    """Number of the last committed iteration; -1 for none; null if the store was down."""
    cause: str = ""
    """Cause of the ending in one sentence; empty if nothing failed."""
    failure: FailureClass | None = None
    """Class of the failure; null if nothing failed."""
    log: str = ""
    """Path of the leg's log."""
    lost_nodes: tuple[str, ...] = ()
    """Names of nodes that failed, as far as they are known."""
    nodes: str = ""
    """Nodes that the leg ran on, in SLURM's notation (n[1-2]); empty for a local leg, or if SLURM has forgotten them."""


@dataclass(frozen=True)
class LegAllocation:
    """Allocation that a leg runs in, as the launcher describes it to the leg."""

    ends_at: Callable[[], float]
    """Function that returns when the allocation ends, in seconds since the epoch. The end may move while the leg runs."""
    ray_address: Callable[[], str] | None = None
    """Function that waits for the leg's Ray head and returns its address. None if the leg must start Ray itself, on this
    machine."""
    scratch: Path | None = None
    """Folder on this node's local disk that is deleted with the leg; None if there is none."""
