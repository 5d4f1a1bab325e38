"""A leg, as those see it who launch it, wait for it and are it: where it runs, and how it ended."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from roll_core.errors import FailureClass
from roll_core.types.refs import Record


class LegEnding(StrEnum):
    """Why a leg is over. `flows/rlvr.py` has what follows from each."""

    FINISHED = "finished"
    """The run has nothing left to do."""
    WALLTIME = "walltime"
    """Its time was up."""
    PREEMPTED = "preempted"
    """It was asked to make way."""
    NODE_FAIL = "node_fail"
    """A machine, or Ray on it, was lost."""
    OUT_OF_MEMORY = "out_of_memory"
    """It took more memory than the allocation has."""
    CANCELLED = "cancelled"
    """Somebody cancelled its job."""
    FENCED = "fenced"
    """Another leg has the run: this one must not go on."""
    FAILED = "failed"
    """Anything else; `LegEnded.failure` says whether it can pass."""


class LegEnded(Record):
    """Why a leg ended, as the outer flow reads it.

    `failure` is null where nothing failed; `log` is what the leg's process wrote.

    Example: LegEnded(run_id="quickstart-3", leg=1, ending="finished", last_iteration=40)
    """

    run_id: str
    leg: int
    ending: LegEnding
    last_iteration: int | None
    """That was committed, -1 for none; null where the store could not be asked."""
    cause: str = ""
    failure: FailureClass | None = None
    log: str = ""
    lost_nodes: tuple[str, ...] = ()
    """Machines to blame, where it is known."""


@dataclass(frozen=True)
class LegAllocation:
    """What a leg is told by whoever launched it about where it is."""

    ends_at: Callable[[], float]
    """When the allocation ends, in seconds since the epoch; it may be moved while the leg runs."""
    ray_address: Callable[[], str] | None = None
    """Of the Ray cluster that is started for this leg on all of its nodes, once its head is up; null if the leg starts one,
    on this machine."""
    scratch: Path | None = None
    """A folder on a disk of this node that goes with the leg; null if there is none."""
