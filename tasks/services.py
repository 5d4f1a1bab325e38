"""Live handles that a leg's tasks use: roles, store, tracker, stage log.

`flows/train_leg.py` opens them once per leg and passes them to every stage. They are never hashed or stored.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.config.run import RunConfig
from roll_core.errors import ArtifactDamaged, IterationTaken, NodeUnfit, RollError, one_line
from roll_core.host import make_private_folder, try_lock
from roll_core.provenance import library_versions, machine_kind
from roll_core.reporting.goodput import START
from roll_core.reporting.stage_log import StageLog
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.nodes import NodeFailure, record_failure
from roll_core.store.records.runs import read_chain, read_config, store_of
from roll_core.tracking.tracker import MACHINE_TAG, VERSIONS_TAG, Tracker
from roll_core.types.leg import LegAllocation
from roll_core.types.refs import RunRef
from tasks.leg_time import LegTime
from tasks.pages import BackgroundTracking, Pages

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet

RAY_STAGE = "ray"
"""Stage, within the start of a leg, that waits for the Ray head."""
SHORT_RETRY_SECONDS = 2.0
"""Seconds for which requests are retried whose answer can wait or is not needed, if the store is down."""
STAGE_CACHE, SPOOL = "stage-cache", "spool"
"""Folders within a run's folder: results of PURE tasks, and rollouts on their way to the store."""
LEASE_WAIT_S = 30.0
"""Seconds that a new leg waits for the previous leg on this machine to end."""

log = logging.getLogger(__name__)


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
        self.background = BackgroundTracking(tracker)
        self.pages = Pages(store, run_dir(run, config), config.tracking.trajectory_samples, tracker)
        self.iteration_began_at = time.monotonic()
        """Monotonic time of the last commit, of the end of recovery, or of the leg's start, whichever is last."""
        self.holds_committed_weights = True
        """False while the trainer holds weights other than those of the last manifest: from an update until its iteration is
        committed, and after a recovery that was not exact until the next commit."""


@contextlib.contextmanager
def open_services(run: RunRef, leg: int, allocation: LegAllocation) -> Iterator[Services]:
    """Start the roles and the tracker of a leg for the duration of the block, and stop them however the block ends."""
    from roll_core.roles.fleet import Fleet
    from roll_core.roles.process import freeze_garbage_collector

    config = read_config(run)
    leg_dir = make_private_folder(run_dir(run, config)) / f"leg-{leg}"
    leg_dir.mkdir(exist_ok=True)
    stage_log, leg_time = StageLog(leg_dir), LegTime(allocation.ends_at)
    with (
        _lease(run, config),
        _own_scratch(run, config),
        tracking(run, config) as tracker,
        _recording_unfit_nodes(run, leg),
        contextlib.ExitStack() as stack,
    ):
        with stage_log.stage(START):
            address = _ray_address(allocation, stage_log)
            fleet = stack.enter_context(Fleet(run, config, leg_dir, address, leg_time.is_told_to_stop))
        stack.enter_context(leg_time.handling_signals())
        with tracker.dropping_errors():
            tracker.set_tags({"roll.leg": str(leg), MACHINE_TAG: machine_kind(), VERSIONS_TAG: library_versions()})
        freeze_garbage_collector()
        services = Services(run, config, leg, store_of(run), fleet, tracker, stage_log, leg_time)
        stack.callback(services.background.close, 0.0)
        yield services


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
        record_node_failures(run, leg, error.reasons)
        raise


def record_node_failures(run: RunRef, leg: int, reasons: Mapping[str, str]) -> None:
    """Record failures of nodes, with a reason for each, if the store can be reached. It is retried only briefly: the leg may
    have ended because of it, and a record of a failure must not become one."""
    store = ObjectStore(run.store_uri, SHORT_RETRY_SECONDS)
    for node, reason in reasons.items():
        failure = NodeFailure(node=node, reason=reason, run_id=run.run_id, leg=leg, at=datetime.now(UTC))
        try:
            record_failure(store, failure)
        except (RollError, OSError) as error:
            log.warning("a failure of node %s (%s) is not recorded: %s", node, reason, one_line(error))


@contextlib.contextmanager
def _own_scratch(run: RunRef, config: RunConfig) -> Iterator[None]:
    """Clear the run's folder of what is not for this leg. The lease must be held: a live leg uses the same folder.

    Stage cache and spool are kept if they are this run's, by store and config. A run without manifests has nothing to keep:
    its name may be that of a run in a store that was deleted since. If the block finds a stored object damaged, the stage
    cache is deleted: a cached result may name rollouts that were garbage-collected before they were committed.
    """
    folder = run_dir(run, config)
    owner, marker = f"{run.store_uri} {run.config_digest}", folder / "scratch-owner"
    if not read_chain(store_of(run), run.run_id) or not marker.exists() or marker.read_text() != owner:
        for name in (STAGE_CACHE, SPOOL):
            shutil.rmtree(folder / name, ignore_errors=True)
    marker.write_text(owner)
    # Large, left by killed legs, and read by nothing.
    for pattern in ("leg-*/checkpoint-*", "leg-*/restore-*", "leg-*/export-*"):
        for left in folder.glob(pattern):
            shutil.rmtree(left)
    try:
        yield
    except ArtifactDamaged:
        shutil.rmtree(folder / STAGE_CACHE, ignore_errors=True)
        raise


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
    the commit itself; the lease only makes a clash visible early, and is skipped on a file system without locks.
    """
    with open(run_dir(run, config) / "lease", "w") as lease:
        ends_at = time.monotonic() + LEASE_WAIT_S
        while not try_lock(lease):
            if time.monotonic() > ends_at:
                raise IterationTaken(
                    f"another leg of {run.run_id} is alive on this machine: wait for it, or stop it, then resume"
                )
            time.sleep(0.2)
        yield
