"""`Tracker`, through which a leg logs. Every call appends to the spool; an error is logged once and never reaches training.

Used by the leg driver. The tracker starts the uploader, a separate process, which alone imports MLflow and waits for it.
"""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from roll_core.config.load import absolute_sqlite_uri
from roll_core.config.operations.services import TrackingConfig
from roll_core.tracking.spool import (
    ArtifactLogged,
    Destination,
    MetricsLogged,
    ParamsLogged,
    RunEnded,
    RunStatus,
    Spool,
    SpoolWriter,
    TagsSet,
    TrackingEvent,
)
from roll_core.types.manifest import Metrics
from roll_core.types.refs import RunRef

_LOGGER = logging.getLogger(__name__)

MACHINE_TAG, VERSIONS_TAG = "roll.machine", "roll.versions"
"""MLflow tags: machine and library versions of the newest leg."""
_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_KILL_WAIT_SECONDS = 5.0
"""Longest wait for the killed uploader. A blocked disk call can delay its death, and the end of a leg must not hang."""


class Tracker:
    """Logger of a run's metrics, params, tags and artifacts to MLflow, by way of the spool.

    Example: tracker = Tracker(config.tracking, run, Path("/tmp/roll/quickstart-3")); tracker.start();
    tracker.log_metrics(4, {"reward/mean": 0.41}, datetime.now(UTC)); tracker.end(RunStatus.FINISHED); tracker.close()
    """

    def __init__(self, config: TrackingConfig, run: RunRef, spool_dir: Path):
        self._drain_seconds = config.drain_seconds
        self._destination = _destination(config, run)
        self._spool = Spool(spool_dir)
        self.is_fresh = not self._spool.events_file.exists()
        """True if the spool is new. Events that earlier legs spooled on another machine may be lost and are logged again."""
        self._writer = SpoolWriter(self._spool)
        self._uploader: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._num_dropped = 0
        self._kinds_seen: set[type[Exception]] = set()

    def start(self) -> None:
        """Start the uploader process, unless `tracking.uri` is null. It first sends the events that earlier legs left in the
        spool."""
        if self._destination is None:
            return
        try:
            self._spool.write_destination(self._destination)
            self._spool.clear_drain()
            self._uploader = self._spawn_uploader()
        except OSError as error:
            _LOGGER.warning("tracking has no uploader, so events stay in %s: %s", self._spool.folder, error)

    def log_metrics(self, iteration: int, metrics: Metrics, at: datetime) -> None:
        """Log metrics of an iteration. Idempotent: logged again with the same time, they are the same points in MLflow."""
        with self.dropping_errors():
            timestamp_ms = int(at.timestamp() * 1000)
            self._append(MetricsLogged(iteration=iteration, metrics=metrics, timestamp_ms=timestamp_ms))

    def log_artifact(self, name: str, data: bytes) -> None:
        """Log bytes as an artifact. `name` may contain folders, as in "manifests/00000004.json"."""
        with self.dropping_errors():
            self._append(ArtifactLogged(name=name, file=self._spool.put_artifact(name, data)))

    def log_params(self, params: dict[str, str]) -> None:
        """Log params. MLflow keeps the first value of a param and refuses to change it."""
        with self.dropping_errors():
            self._append(ParamsLogged(params=params))

    def set_tags(self, tags: dict[str, str]) -> None:
        """Set tags of the MLflow run; a new value replaces the old one."""
        with self.dropping_errors():
            self._append(TagsSet(tags=tags))

    def end(self, status: RunStatus) -> None:
        """Log that the run, not only this leg, has ended. Later events are dropped: they would mark it as running again."""
        with self.dropping_errors():
            self._append(RunEnded(status=status, timestamp_ms=_now_ms()))
            self._has_ended = True

    def close(self) -> int:
        """Drain the spool for at most `drain_seconds`, stop the uploader, and return the number of events not uploaded.

        These stay in the spool for the next leg, except events that could not be written to the spool.
        """
        self._stop_uploader()
        try:
            return self._spool.count_left() + self._num_dropped
        except OSError as error:
            _LOGGER.warning("tracking cannot read its spool %s: %s", self._spool.folder, error)
            return self._num_dropped

    @contextlib.contextmanager
    def dropping_errors(self) -> Iterator[None]:
        """Count what the block could not log as dropped instead of raising: no fault of tracking may end a run.

        The first error of each kind is logged with its traceback.
        """
        try:
            yield
        except Exception as error:
            self._num_dropped += 1
            if type(error) not in self._kinds_seen:
                self._kinds_seen.add(type(error))
                _LOGGER.warning("tracking loses events in %s: %s", self._spool.folder, error, exc_info=True)

    def _append(self, event: TrackingEvent) -> None:
        if self._has_ended:
            raise ValueError("the run has ended, and an event after its end would mark it as running again")
        self._writer.append(event)

    def _spawn_uploader(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "roll_core.tracking.uploader", str(self._spool.folder)]
        command += ["--parent-pid", str(os.getpid()), "--drain-seconds", str(self._drain_seconds)]
        python_path = [str(_SOURCE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._spool.log_file.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path)},
                start_new_session=True,
            )

    def _stop_uploader(self) -> None:
        if self._uploader is None:
            return
        try:
            self._spool.request_drain(time.time() + self._drain_seconds)
            self._uploader.wait(self._drain_seconds)
        except (OSError, subprocess.TimeoutExpired):
            # Killing is safe at any moment: events sent since the last write of the cursor are sent again, to no effect.
            self._uploader.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._uploader.wait(_KILL_WAIT_SECONDS)


def _destination(config: TrackingConfig, run: RunRef) -> Destination | None:
    uri = absolute_sqlite_uri(config.uri)
    if uri is None:
        return None
    return Destination(tracking_uri=uri, experiment=config.experiment, run_id=run.run_id, store_uri=run.store_uri)


def _now_ms() -> int:
    return int(time.time() * 1000)
