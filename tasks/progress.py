"""Progress announcements of the outer flow: a line in the flow's log, and a log record for the terminal display.

Used by `flows/rlvr.py` and `tasks/legs.py`; `flows/cli/progress_view.py` draws the log records.
"""

import contextlib
import logging

from prefect import get_run_logger

from roll_core.errors import RollError, one_line
from roll_core.reporting.stage_log import PROGRESS_LOGGER
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import read_manifest
from roll_core.types.manifest import Manifest
from roll_core.types.refs import RunRef
from tasks.services import SHORT_RETRY_SECONDS


def announce_run(run: RunRef) -> None:
    """Announce that a run is open, on the progress logger."""
    logging.getLogger(PROGRESS_LOGGER).info("run %s", run.run_id, extra={"run": run})


def announce_obstacle(sentence: str) -> None:
    """Announce, as a warning, what keeps a run from going on, or from being shown."""
    get_run_logger().warning(sentence)
    logging.getLogger(PROGRESS_LOGGER).warning(sentence)


class ManifestWatch:
    """Poller that announces the manifests of a run as any process commits them."""

    def __init__(self, run: RunRef, next_iteration: int):
        """Watch a run from the manifest of `next_iteration` on."""
        self._run = run
        self._store = ObjectStore(run.store_uri, retry_seconds=SHORT_RETRY_SECONDS)
        self._next = next_iteration

    def poll(self) -> None:
        """Announce the manifests committed since the last poll. If the store is down, the next poll announces them.

        Never raises: a leg must not end because its flow cannot watch it. After an update of the code, legs write records
        that a flow of the code before it cannot read.
        """
        with contextlib.suppress(OSError):
            while self._announce_next():
                self._next += 1

    def _announce_next(self) -> bool:
        """Announce the next iteration, and return True, if it is committed."""
        try:
            manifest = read_manifest(self._store, self._run.run_id, self._next)
            if manifest is not None:
                self._announce(manifest)
            return manifest is not None
        except OSError:
            raise
        except (RollError, KeyError, ValueError) as error:
            announce_obstacle(f"iteration {self._next} is committed, but cannot be shown: {one_line(error)}")
            return True

    def _announce(self, manifest: Manifest) -> None:
        sentence = describe(manifest)
        get_run_logger().info(sentence)
        logging.getLogger(PROGRESS_LOGGER).info(sentence, extra={"manifest": manifest})


def describe(manifest: Manifest) -> str:
    """Describe an iteration in a line. Example: iteration 12: reward 0.61, held-out accuracy 0.88, 5120 tokens/s"""
    parts = [f"iteration {manifest.iteration}:"]
    if manifest.collected:
        parts.append(f"reward {manifest.metrics['reward/mean']:.2f},")
    if manifest.evaluated:
        parts.append(f"held-out accuracy {manifest.evaluated.accuracy:.2f},")
    if manifest.collected:
        parts.append(f"{manifest.metrics['throughput/tokens_per_second']:.0f} tokens/s")
    return " ".join(parts).rstrip(",")
