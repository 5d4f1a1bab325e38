"""The live things a leg's tasks talk to: the roles, the store, the tracker. Opened once per leg, never hashed or stored."""

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
from roll_core.provenance import library_versions, machine_kind
from roll_core.reporting.goodput import START
from roll_core.reporting.stage_log import StageLog
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.nodes import NodeFailure, note_failure
from roll_core.store.records.runs import read_config, store_of
from roll_core.tracking.tracker import MACHINE_TAG, VERSIONS_TAG, Tracker
from roll_core.types.leg import LegAllocation
from roll_core.types.refs import RunRef
from tasks.leg_time import LegTime

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet

RAY = "ray"
"""A stage of the start: waiting for Ray's head."""
LEASE_WAIT_S = 30.0
"""How long a new leg waits for the previous one on this machine to be gone."""


class Services:
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


@contextlib.contextmanager
def open_services(run: RunRef, leg: int, place: LegAllocation) -> Iterator[Services]:
    """Everything a leg needs, started; gone again when it ends, however it ends."""
    from roll_core.roles.fleet import Fleet
    from roll_core.roles.process import settle

    config = read_config(run)
    leg_dir = run_dir(run, config) / f"leg-{leg}"
    leg_dir.mkdir(parents=True, exist_ok=True)
    stage_log, leg_time = StageLog(leg_dir), LegTime(place.ends_at)
    with _lease(run, config), tracking(run, config) as tracker, contextlib.ExitStack() as stack:
        _clear_scratch(run_dir(run, config))
        with stage_log.stage(START), _remembering_unfit_nodes(run, leg):
            fleet = stack.enter_context(Fleet(run, config, leg_dir, _ray_address(place, stage_log)))
        stack.enter_context(leg_time.listening())
        tracker.set_tags({"roll.leg": str(leg), MACHINE_TAG: machine_kind(), VERSIONS_TAG: library_versions()})
        settle()
        yield Services(run, config, leg, store_of(run), fleet, tracker, stage_log, leg_time)


def _ray_address(place: LegAllocation, stage_log: StageLog) -> str | None:
    if place.ray_address is None:
        return None
    with stage_log.stage(RAY):
        return place.ray_address()


@contextlib.contextmanager
def _remembering_unfit_nodes(run: RunRef, leg: int) -> Iterator[None]:
    """What was found wrong with nodes counts against them, for all runs."""
    try:
        yield
    except NodeUnfit as error:
        for node, reason in error.reasons.items():
            failure = NodeFailure(node=node, reason=reason, run_id=run.run_id, leg=leg, at=datetime.now(UTC))
            note_failure(store_of(run), failure)
        raise


def _clear_scratch(folder: Path) -> None:
    """What killed legs left of folders they were storing or loading: as large as they were, and no use to anybody."""
    for pattern in ("leg-*/checkpoint-*", "leg-*/restore-*", "leg-*/export-*"):
        for left in folder.glob(pattern):
            shutil.rmtree(left)


@contextlib.contextmanager
def tracking(run: RunRef, config: RunConfig) -> Iterator[Tracker]:
    """The run's tracker, uploading while it is open."""
    tracker = Tracker(config.tracking, run, run_dir(run, config) / "tracking")
    tracker.start()
    try:
        yield tracker
    finally:
        tracker.close()


def run_dir(run: RunRef, config: RunConfig) -> Path:
    """A run's scratch folder. Nothing in it is needed to resume: that is all in the store."""
    return Path(config.work_dir) / run.run_id


@contextlib.contextmanager
def _lease(run: RunRef, config: RunConfig) -> Iterator[None]:
    """One live leg per run and machine. The kernel drops the lock when its holder dies, so it is never stale.

    Legs on different machines are kept apart by the commit itself; this only makes a clash visible early.
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
