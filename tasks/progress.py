"""Says aloud what a run does: a line in the flow's log, and a record that a terminal can draw."""

import contextlib
import logging

from prefect import get_run_logger

from roll_core.reporting.stage_log import PROGRESS_LOGGER
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import read_manifest
from roll_core.types.manifest import Manifest
from roll_core.types.refs import RunRef

GLANCE_SECONDS = 2.0
"""Whoever watches looks again anyway, and must not miss the end of a leg while a store is down."""


def announce_run(run: RunRef) -> None:
    logging.getLogger(PROGRESS_LOGGER).info("run %s", run.run_id, extra={"run": run})


class ManifestWatch:
    """Announces manifests of a run as they are committed, whoever commits them."""

    def __init__(self, run: RunRef, next_iteration: int):
        self._run = run
        self._store = ObjectStore(run.store_uri, retry_seconds=GLANCE_SECONDS)
        self._next = next_iteration

    def look(self) -> None:
        """Announce everything committed since the last look. A store that cannot be read now is looked at again later."""
        with contextlib.suppress(OSError):
            while (manifest := read_manifest(self._store, self._run.run_id, self._next)) is not None:
                self._announce(manifest)
                self._next += 1

    def _announce(self, manifest: Manifest) -> None:
        sentence = describe(manifest)
        get_run_logger().info(sentence)
        logging.getLogger(PROGRESS_LOGGER).info(sentence, extra={"manifest": manifest})


def describe(manifest: Manifest) -> str:
    """Example: iteration 12: reward 0.61, held-out accuracy 0.88, 5120 tokens/s"""
    parts = [f"iteration {manifest.iteration}:"]
    if manifest.collected:
        parts.append(f"reward {manifest.metrics['reward/mean']:.2f},")
    if manifest.evaluated:
        parts.append(f"held-out accuracy {manifest.evaluated.accuracy:.2f},")
    if manifest.collected:
        parts.append(f"{manifest.metrics['throughput/tokens_per_second']:.0f} tokens/s")
    return " ".join(parts).rstrip(",")
