"""Process that uploads a spool to MLflow: `python -m roll_core.tracking.uploader SPOOL_DIR [--once]`.

The tracker starts it beside a leg; a person starts it with `--once` after an outage. It retries while the leg lives, then
until the leg's drain deadline. Events left after that wait in the spool for the next uploader.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.host import try_lock
from roll_core.tracking.spool import (
    ArtifactLogged,
    MetricsLogged,
    MlflowDeleted,
    ParamsLogged,
    RunEnded,
    Spool,
    SpooledEvent,
    TagsSet,
)

if TYPE_CHECKING:
    from roll_core.tracking.mlflow_run import MlflowRun

_LOGGER = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
"""Interval between polls of the spool: a few system calls per second, and metrics at most this late."""
_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 15.0
"""Exponential backoff between failed uploads: its first and its longest delay."""
_NICENESS = 10
"""Scheduling priority of this process: training comes first on a busy machine."""
_MAX_EVENTS = 100
"""Most events sent between two checks of the deadline. With ten metrics each, they fill MLflow's largest call."""
_MAX_ERROR_CHARACTERS = 1000
_MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
"""Settings that make MLflow fail fast: retries and backoff are in this file."""
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that SLURM sends to every process of a job. The leg handles them, still logs, and requests the drain itself."""


class UploadDeadline:
    """Deadline of the upload: none while the parent lives and has not requested a drain, then a point in time."""

    def __init__(self, spool: Spool, parent_pid: int, drain_seconds: float):
        self._spool = spool
        self._parent_pid = parent_pid
        self._drain_seconds = drain_seconds
        self._deadline: float | None = None

    def is_draining(self) -> bool:
        """True once the parent has requested a drain or has died."""
        if self._deadline is None:
            self._deadline = self._spool.drain_deadline()
        # getppid detects the parent's death even if its pid is in use again: an orphan gets another parent.
        if self._deadline is None and os.getppid() != self._parent_pid:
            self._deadline = time.time() + self._drain_seconds
        return self._deadline is not None

    def is_over(self) -> bool:
        """True once the deadline has passed."""
        return self.is_draining() and self._deadline is not None and time.time() >= self._deadline

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until draining begins or the deadline passes."""
        was_draining = self.is_draining()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.is_draining() == was_draining and not self.is_over():
            time.sleep(min(left, _POLL_SECONDS))


class Upload:
    """Upload of one spool, from its cursor on. Only the process that holds the spool's lock may create one."""

    def __init__(self, spool: Spool):
        self._spool = spool
        self._offset = spool.read_cursor()
        self._run: MlflowRun | None = None
        self._is_deleted = False
        self.num_dropped = 0
        """Number of events dropped because the MLflow run or its experiment was deleted."""

    def advance(self) -> bool:
        """Upload the next events; returns False if there were none. After an error, the next call resumes at the cursor.

        Once MLflow says that the run was deleted, events are dropped: it would refuse them for the rest of the leg.
        """
        pending = self._spool.read(self._offset, _MAX_EVENTS)
        if pending.end == self._offset:
            return False
        if pending.num_damaged:
            _LOGGER.warning("skipped %d damaged lines of %s", pending.num_damaged, self._spool.events_file)
        for events in _batches(pending.events):
            self._send_or_drop(events)
            self._advance_cursor(events[-1].end)
            self._remove_artifacts(events)
        self._advance_cursor(pending.end)
        return True

    def _send_or_drop(self, events: Sequence[SpooledEvent]) -> None:
        try:
            if not self._is_deleted:
                self._send(events)
        except MlflowDeleted as error:
            _LOGGER.warning("events of this leg are dropped from here on: %s", error)
            self._is_deleted = True
        if self._is_deleted:
            self.num_dropped += len(events)

    def reconnect(self) -> None:
        """Find the MLflow run again before the next event, in case it was deleted or its server was replaced."""
        self._run = None

    def _send(self, events: Sequence[SpooledEvent]) -> None:
        run = self._connected_run()
        match events[0].event:
            case MetricsLogged():
                run.log_metrics([spooled.event for spooled in events if isinstance(spooled.event, MetricsLogged)])
            case ParamsLogged(params=params):
                run.log_params(params)
            case TagsSet(tags=tags):
                run.set_tags(tags)
            case ArtifactLogged() as artifact:
                self._send_artifact(run, artifact)
            case RunEnded() as ended:
                run.end(ended)
                # Any later event comes from a leg that resumed the run: reconnecting marks it as running.
                self.reconnect()

    def _send_artifact(self, run: "MlflowRun", artifact: ArtifactLogged) -> None:
        path = self._spool.artifact_path(artifact.file)
        if path.exists():
            run.log_artifact(artifact.name, path)
        else:
            _LOGGER.warning("artifact %s is not in the spool: uploaded before, or removed by hand", artifact.name)

    def _connected_run(self) -> "MlflowRun":
        """Return the MLflow run, opened at the first event: polling the spool of a finished run must not reopen it."""
        if self._run is None:
            os.environ.update(_MLFLOW_ENVIRONMENT)
            from roll_core.tracking.mlflow_run import MlflowRun

            started = time.monotonic()
            self._run = MlflowRun(self._spool.read_destination())
            _LOGGER.info("uploading to MLflow run %s, found in %.1f s", self._run.run_id, time.monotonic() - started)
        return self._run

    def _advance_cursor(self, offset: int) -> None:
        if offset > self._offset:
            self._spool.write_cursor(offset)
            self._offset = offset

    def _remove_artifacts(self, events: Sequence[SpooledEvent]) -> None:
        for spooled in events:
            if isinstance(spooled.event, ArtifactLogged):
                self._spool.remove_artifact(spooled.event.file)


def _batches(events: Sequence[SpooledEvent]) -> list[list[SpooledEvent]]:
    """Group consecutive metrics events into batches; every other event is a batch of one. The order stays."""
    batches: list[list[SpooledEvent]] = []
    for spooled in events:
        joins = isinstance(spooled.event, MetricsLogged) and batches and isinstance(batches[-1][0].event, MetricsLogged)
        if joins:
            batches[-1].append(spooled)
        else:
            batches.append([spooled])
    return batches


def follow(spool: Spool, deadline: UploadDeadline) -> int:
    """Upload events as they are logged, until the deadline. Returns the exit code: 0 if nothing is left, else 1."""
    with spool.lock_file.open("ab") as lock:
        while not try_lock(lock):
            if deadline.is_over():
                return 1
            deadline.wait(_POLL_SECONDS)
        upload = Upload(spool)
        exit_code = _follow_locked(upload, deadline)
        _report_dropped(upload)
        return exit_code


def _follow_locked(upload: Upload, deadline: UploadDeadline) -> int:
    backoff = _FIRST_BACKOFF_SECONDS
    while not deadline.is_over():
        # Checked before the upload: a drain request comes after the last event, so an empty spool is then final.
        was_draining = deadline.is_draining()
        try:
            uploaded = upload.advance()
        # For an outage MLflow raises its own errors and those of requests, SQLAlchemy and the operating system.
        except Exception as error:
            _LOGGER.warning("trying again in %.1f s: %s", backoff, _abbreviated(error))
            upload.reconnect()
            deadline.wait(backoff)
            just_began = deadline.is_draining() and not was_draining
            backoff = _FIRST_BACKOFF_SECONDS if just_began else min(2 * backoff, _LAST_BACKOFF_SECONDS)
            continue
        backoff = _FIRST_BACKOFF_SECONDS
        if not uploaded and was_draining:
            return 0
        if not uploaded:
            deadline.wait(_POLL_SECONDS)
    return 1


def upload_once(spool: Spool) -> int:
    """Upload the events in the spool and return. Returns the exit code: 0 if nothing is left, else 1."""
    if not spool.folder.is_dir():
        _LOGGER.error("SPOOL_DIR: there is no folder %s", spool.folder)
        return 1
    with spool.lock_file.open("ab") as lock:
        if not try_lock(lock):
            _LOGGER.error("another uploader is at work in %s; it will upload what is there", spool.folder)
            return 1
        upload = Upload(spool)
        try:
            while upload.advance():
                pass
            _report_dropped(upload)
        except Exception as error:
            _LOGGER.error("%d events are left in %s: %s", spool.count_left(), spool.folder, _abbreviated(error))
            return 1
    return 0


def _report_dropped(upload: Upload) -> None:
    if upload.num_dropped:
        _LOGGER.warning("dropped %d events of a run or experiment that was deleted in MLflow", upload.num_dropped)


def _abbreviated(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m roll_core.tracking.uploader", description="Upload a spool to MLflow.")
    parser.add_argument("spool_dir", type=Path)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--once", action="store_true", help="upload what is there and exit: 0 if nothing is left, else 1")
    mode.add_argument("--parent-pid", type=int, default=os.getppid(), help="follow the spool while this parent lives")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="time to finish once the parent is gone")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the uploader; returns the exit code."""
    parsed = _parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # urllib3 would log every failure a second time, less clearly.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    spool = Spool(parsed.spool_dir)
    if parsed.once:
        return upload_once(spool)
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    return follow(spool, UploadDeadline(spool, parsed.parent_pid, parsed.drain_seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
