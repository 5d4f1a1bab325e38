"""The process that carries a spool to MLflow: `python -m roll_core.tracking.uploader SPOOL_DIR [--once]`.

Started by the tracker beside a leg, and by a person (`--once`) after an outage. It retries for as long as the leg
lives, then for as long as the leg granted; what is left waits in the spool for the next uploader.
"""

import argparse
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.tracking.spool import (
    ArtifactLogged,
    MetricsLogged,
    ParamsLogged,
    RunEnded,
    Spool,
    SpooledEvent,
    TagsSet,
)

if TYPE_CHECKING:
    from roll_core.tracking.mlflow_run import MlflowRun

_LOGGER = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
"""Between looks at the spool: a few system calls a second, and metrics at most this late."""
_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 15.0
_NICENESS = 10
"""Training comes first on a crowded machine."""
_MAX_EVENTS = 100
"""Sent between two looks at the deadline; with ten metrics an event they fill MLflow's largest call."""
_MAX_ERROR_CHARACTERS = 1000
_MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
"""MLflow fails fast and leaves the patience to this file."""
_SIGNALS_MEANT_FOR_THE_LEG = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""SLURM warns every process of a job; the leg reacts, still logs, and tells the uploader when to go."""


class UploadDeadline:
    """How long to go on: for ever while the parent lives and has not asked to drain; then until a deadline."""

    def __init__(self, spool: Spool, parent_pid: int, drain_seconds: float):
        self._spool = spool
        self._parent_pid = parent_pid
        self._drain_seconds = drain_seconds
        self._deadline: float | None = None

    def is_draining(self) -> bool:
        if self._deadline is None:
            self._deadline = self._spool.drain_deadline()
        # The parent of an orphan is another process, even where the pid of the dead one is in use again.
        if self._deadline is None and os.getppid() != self._parent_pid:
            self._deadline = time.time() + self._drain_seconds
        return self._deadline is not None

    def is_over(self) -> bool:
        return self.is_draining() and self._deadline is not None and time.time() >= self._deadline

    def wait(self, seconds: float) -> None:
        """Wait, but no longer than until draining begins, or until it is over."""
        was_draining = self.is_draining()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.is_draining() == was_draining and not self.is_over():
            time.sleep(min(left, _LOOK_SECONDS))


class Upload:
    """The upload of one spool, from its cursor on. Only the holder of the spool's lock may make one."""

    def __init__(self, spool: Spool):
        self._spool = spool
        self._offset = spool.read_cursor()
        self._run: MlflowRun | None = None

    def advance(self) -> bool:
        """Upload the next events; false if there were none. Raises what MLflow raises, and then goes on from there."""
        pending = self._spool.read(self._offset, _MAX_EVENTS)
        if pending.end == self._offset:
            return False
        if pending.num_damaged:
            _LOGGER.warning("skipped %d damaged lines of %s", pending.num_damaged, self._spool.events_file)
        for events in _batches(pending.events):
            self._send(events)
            self._tick_off(events[-1].end)
            self._remove_artifacts(events)
        self._tick_off(pending.end)
        return True

    def reconnect(self) -> None:
        """Find the MLflow run anew before the next event, in case it was deleted or its server replaced."""
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
                # Whatever follows was logged by a leg that took the run up again: opening marks it as running.
                self.reconnect()

    def _send_artifact(self, run: "MlflowRun", artifact: ArtifactLogged) -> None:
        path = self._spool.artifact_path(artifact.file)
        if path.exists():
            run.log_artifact(artifact.name, path)
        else:
            _LOGGER.warning("artifact %s is not in the spool: uploaded before, or removed by hand", artifact.name)

    def _connected_run(self) -> "MlflowRun":
        """Connect at the first event, so that looking at a finished run does not mark it as running again."""
        if self._run is None:
            os.environ.update(_MLFLOW_ENVIRONMENT)
            from roll_core.tracking.mlflow_run import MlflowRun

            started = time.monotonic()
            self._run = MlflowRun(self._spool.read_destination())
            _LOGGER.info("uploading to MLflow run %s, found in %.1f s", self._run.run_id, time.monotonic() - started)
        return self._run

    def _tick_off(self, offset: int) -> None:
        if offset > self._offset:
            self._spool.write_cursor(offset)
            self._offset = offset

    def _remove_artifacts(self, events: Sequence[SpooledEvent]) -> None:
        for spooled in events:
            if isinstance(spooled.event, ArtifactLogged):
                self._spool.remove_artifact(spooled.event.file)


def _batches(events: Sequence[SpooledEvent]) -> list[list[SpooledEvent]]:
    """Neighbouring metrics together, every other event alone; the order stays."""
    batches: list[list[SpooledEvent]] = []
    for spooled in events:
        joins = isinstance(spooled.event, MetricsLogged) and batches and isinstance(batches[-1][0].event, MetricsLogged)
        if joins:
            batches[-1].append(spooled)
        else:
            batches.append([spooled])
    return batches


def follow(spool: Spool, patience: UploadDeadline) -> int:
    """Upload what is logged, as it is logged, until patience is over. Answers the exit code."""
    with spool.lock_file.open("ab") as lock:
        while not _try_lock(lock.fileno()):
            if patience.is_over():
                return 1
            patience.wait(_LOOK_SECONDS)
        return _follow_locked(Upload(spool), patience)


def _follow_locked(upload: Upload, patience: UploadDeadline) -> int:
    backoff = _FIRST_BACKOFF_SECONDS
    while not patience.is_over():
        # Asked before looking: a request to drain comes after the last event.
        was_draining = patience.is_draining()
        try:
            uploaded = upload.advance()
        # MLflow raises its own, requests', SQLAlchemy's and the operating system's errors for "not now".
        except Exception as error:
            _LOGGER.warning("trying again in %.1f s: %s", backoff, _in_short(error))
            upload.reconnect()
            patience.wait(backoff)
            just_began = patience.is_draining() and not was_draining
            backoff = _FIRST_BACKOFF_SECONDS if just_began else min(2 * backoff, _LAST_BACKOFF_SECONDS)
            continue
        backoff = _FIRST_BACKOFF_SECONDS
        if not uploaded and was_draining:
            return 0
        if not uploaded:
            patience.wait(_LOOK_SECONDS)
    return 1


def upload_once(spool: Spool) -> int:
    """Upload what is there. Answers the exit code: 1 if anything is left."""
    if not spool.folder.is_dir():
        _LOGGER.error("SPOOL_DIR: there is no folder %s", spool.folder)
        return 1
    with spool.lock_file.open("ab") as lock:
        if not _try_lock(lock.fileno()):
            _LOGGER.error("another uploader is at work in %s; it will upload what is there", spool.folder)
            return 1
        upload = Upload(spool)
        try:
            while upload.advance():
                pass
        except Exception as error:
            _LOGGER.error("%d events are left in %s: %s", spool.count_left(), spool.folder, _in_short(error))
            return 1
    return 0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_short(error: Exception) -> str:
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
    parsed = _parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Repeats, less clearly, every failure that is logged here.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    spool = Spool(parsed.spool_dir)
    if parsed.once:
        return upload_once(spool)
    for number in _SIGNALS_MEANT_FOR_THE_LEG:
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    return follow(spool, UploadDeadline(spool, parsed.parent_pid, parsed.drain_seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
