"""What a leg logs through. Every call is one append to the spool; a failure is told once and never reaches training.

Used by the leg driver. The uploader it starts is another process, which alone imports MLflow and alone waits for it.
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
)
from roll_core.types.manifest import Metrics
from roll_core.types.refs import RunRef

_LOGGER = logging.getLogger(__name__)

MACHINE_TAG, VERSIONS_TAG = "roll.machine", "roll.versions"
"""What the newest leg runs on, and with."""
_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_SECONDS_TO_DIE = 5.0
"""A killed process can outlive its signal in a blocked disk call; the end of a leg does not wait longer for that."""


class Tracker:
    """One run's metrics, params, tags and artifacts, on their way to MLflow.

    Example: tracker = Tracker(config.tracking, run, Path("/tmp/roll/quickstart-3")); tracker.start();
    tracker.log_metrics(4, {"reward/mean": 0.41}); tracker.end(RunStatus.FINISHED); tracker.close()
    """

    def __init__(self, config: TrackingConfig, run: RunRef, spool_dir: Path):
        self._drain_seconds = config.drain_seconds
        self._destination = Destination(
            tracking_uri=absolute_sqlite_uri(config.uri),
            experiment=config.experiment,
            run_id=run.run_id,
            store_uri=run.store_uri,
        )
        self._spool = Spool(spool_dir)
        self.is_fresh = not self._spool.events_file.exists()
        """Nothing was ever logged from here: what the run logged elsewhere may have been lost with that place."""
        self._writer = SpoolWriter(self._spool)
        self._uploader: subprocess.Popen[bytes] | None = None
        self._num_dropped = 0

    def start(self) -> None:
        """Start the uploader, which first sends what earlier legs left in the spool."""
        try:
            self._spool.write_destination(self._destination)
            self._spool.forget_drain()
            self._uploader = self._spawn_uploader()
        except OSError as error:
            _LOGGER.warning("tracking has no uploader, so events stay in %s: %s", self._spool.folder, error)

    def log_metrics(self, iteration: int, metrics: Metrics, at: datetime) -> None:
        """Logged again with the same time, they are the same points."""
        with self._spooling():
            timestamp_ms = int(at.timestamp() * 1000)
            self._writer.append(MetricsLogged(iteration=iteration, metrics=metrics, timestamp_ms=timestamp_ms))

    def log_artifact(self, name: str, data: bytes) -> None:
        """Keep `data` as an artifact; `name` may hold folders, as in "manifests/00000004.json"."""
        with self._spooling():
            self._writer.append(ArtifactLogged(name=name, file=self._spool.put_artifact(name, data)))

    def log_params(self, params: dict[str, str]) -> None:
        """Log params. The first value of a param stays: MLflow refuses to change one."""
        with self._spooling():
            self._writer.append(ParamsLogged(params=params))

    def set_tags(self, tags: dict[str, str]) -> None:
        with self._spooling():
            self._writer.append(TagsSet(tags=tags))

    def end(self, status: RunStatus) -> None:
        """Say that the run, not only this leg, is over. Logged last: what comes later means the run goes on."""
        with self._spooling():
            self._writer.append(RunEnded(status=status, timestamp_ms=_now_ms()))

    def close(self) -> int:
        """Let the uploader finish for at most `drain_seconds`, then stop it. Answers how many events did not arrive.

        They stay in the spool for the next leg, except those that could not even be written there.
        """
        self._stop_uploader()
        try:
            self._writer.close()
            return self._spool.count_left() + self._num_dropped
        except OSError as error:
            _LOGGER.warning("tracking cannot read its spool %s: %s", self._spool.folder, error)
            return self._num_dropped

    @contextlib.contextmanager
    def _spooling(self) -> Iterator[None]:
        """An event that cannot be spooled is lost and counted: a full disk or a bad value must not end a run."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self._num_dropped == 0:
                _LOGGER.warning("tracking loses events, of which this is the first, in %s: %s", self._spool.folder, error)
            self._num_dropped += 1

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
            # Killing is safe at any moment: what was sent but not yet ticked off is sent again, to no effect.
            self._uploader.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._uploader.wait(_SECONDS_TO_DIE)


def _now_ms() -> int:
    return int(time.time() * 1000)
