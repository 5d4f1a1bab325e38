"""Live handles that a leg's tasks use: roles, store, tracker, stage log.

`flows/train_leg.py` opens them once per leg and passes them to every stage. They are never hashed or stored.
"""

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.config.run import RunConfig
from roll_core.errors import IterationTaken, NodeUnfit
from roll_core.host import make_private_folder
from roll_core.provenance import library_versions, machine_kind
from roll_core.reporting.goodput import START
from roll_core.reporting.stage_log import StageLog
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.nodes import NodeFailure, record_failure
from roll_core.store.records.runs import read_config, store_of
from roll_core.tracking.tracker import MACHINE_TAG, VERSIONS_TAG, Tracker
from roll_core.types.leg import LegAllocation
from roll_core.types.refs import RunRef
from tasks.leg_time import LegTime

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet

RAY_STAGE = "ray"
"""Stage, within the start of a leg, that waits for the Ray head."""
LEASE_WAIT_S = 30.0
"""Seconds that a new leg waits for the previous leg on this machine to end."""


class Services:
    """Handles of one leg. Every stage takes them as its `services` parameter."""

    def __init__(
        self,
        run: RunRef,
        config: RunConfig,
        leg: int,
        store: ObjectStore,
        fleet: "Fleet",
        tracker: Tracker,
        stage_log: StageLog,
        leg_time: LegTime,
    ):
        self.run = run
        self.config = config
        self.leg = leg
        self.store = store
        self.fleet = fleet
        self.tracker = tracker
        self.stage_log = stage_log
        self.leg_time = leg_time
        self.last_commit_at = time.monotonic()
        """Monotonic time of the last commit, or of the leg's start."""


@contextlib.contextmanager
def open_services(run: RunRef, leg: int, allocation: LegAllocation) -> Iterator[Services]:
    """Start the roles and the tracker of a leg for the duration of the block, and stop them however the block ends."""
    from roll_core.roles.fleet import Fleet
    from roll_core.roles.process import freeze_garbage_collector

    config = read_config(run)
    leg_dir = make_private_folder(run_dir(run, config)) / f"leg-{leg}"
    leg_dir.mkdir(exist_ok=True)
    stage_log, leg_time = StageLog(leg_dir), LegTime(allocation.ends_at)
    with _lease(run, config), tracking(run, config) as tracker, contextlib.ExitStack() as stack:
        _clear_scratch(run_dir(run, config))
        with stage_log.stage(START), _recording_unfit_nodes(run, leg):
            fleet = stack.enter_context(Fleet(run, config, leg_dir, _ray_address(allocation, stage_log)))
        stack.enter_context(leg_time.handling_signals())
        tracker.set_tags({"roll.leg": str(leg), MACHINE_TAG: machine_kind(), VERSIONS_TAG: library_versions()})
        freeze_garbage_collector()
        yield Services(run, config, leg, store_of(run), fleet, tracker, stage_log, leg_time)


def _ray_address(allocation: LegAllocation, stage_log: StageLog) -> str | None:
    if allocation.ray_address is None:
        return None
    with stage_log.stage(RAY_STAGE):
        return allocation.ray_address()


@contextlib.contextmanager
def _recording_unfit_nodes(run: RunRef, leg: int) -> Iterator[None]:
    """Record the failures in a NodeUnfit error in the store, where they count against the nodes for all runs."""
    try:
        yield
    except NodeUnfit as error:
        for node, reason in error.reasons.items():
            failure = NodeFailure(node=node, reason=reason, run_id=run.run_id, leg=leg, at=datetime.now(UTC))
            record_failure(store_of(run), failure)
        raise


def _clear_scratch(folder: Path) -> None:
    """Delete the checkpoint, restore and export folders that killed legs left. They are large, and nothing reads them."""
    for pattern in ("leg-*/checkpoint-*", "leg-*/restore-*", "leg-*/export-*"):
        for left in folder.glob(pattern):
            shutil.rmtree(left)


@contextlib.contextmanager
def tracking(run: RunRef, config: RunConfig) -> Iterator[Tracker]:
    """Provide the run's tracker during the block, with its uploader running."""
    tracker = Tracker(config.tracking, run, run_dir(run, config) / "tracking")
    tracker.start()
    try:
        yield tracker
    finally:
        tracker.close()


def run_dir(run: RunRef, config: RunConfig) -> Path:
    """Path of a run's folder within the work folder. A resume needs nothing in it, only the store."""
    return Path(config.work_dir) / run.run_id


@contextlib.contextmanager
def _lease(run: RunRef, config: RunConfig) -> Iterator[None]:
    """Hold the lease on a run during the block: a file lock that admits one live leg per run and machine.

    The kernel releases the lock when its holder dies, so the lease is never stale. Legs on different machines are fenced by
    the commit itself; the lease only makes a clash visible early.
    """
    with open(run_dir(run, config) / "lease", "w") as lease:
        ends_at = time.monotonic() + LEASE_WAIT_S
        while True:
            try:
                fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_at:
                    raise IterationTaken(
                        f"another leg of {run.run_id} is alive on this machine: wait for it, or stop it, then resume"
                    ) from None
                time.sleep(0.2)
        yield
