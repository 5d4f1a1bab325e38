"""Tracking of committed iterations: sends metrics, manifests and pages to the tracker.

Used by `commit`, and at the start of a leg for iterations that an earlier leg did not track. Nothing here raises, and only
appends to the spool happen in the caller's thread.
"""

import functools
from datetime import UTC, datetime

from roll_core.types.manifest import Manifest, Receipt
from tasks.services import Services


def track(manifest: Manifest, services: Services) -> None:
    """Send a committed iteration to the tracker; its pages follow from a thread. Idempotent. Errors are logged."""
    with services.tracker.dropping_errors():
        track_numbers(manifest, services)
        if manifest.evaluated:
            services.background.submit(functools.partial(services.pages.log, manifest))


def track_numbers(manifest: Manifest, services: Services) -> None:
    """Send the metrics, the stage durations and the manifest of an iteration to the tracker."""
    timings = {f"seconds/{stage}": seconds for stage, seconds in manifest.timings.items()}
    committed_at = datetime.fromisoformat(manifest.committed_at)
    services.tracker.log_metrics(manifest.iteration, manifest.metrics | timings, committed_at)
    services.tracker.log_artifact(f"manifests/{manifest.iteration:08d}.json", manifest.model_dump_json(indent=1).encode())


def track_missed(chain: list[Manifest], services: Services) -> None:
    """Track, in the background, the iterations that earlier legs may have committed without tracking them.

    Those are the last iteration, or all of the run's iterations if the spool was lost, and the pages of the last evaluation.
    """
    ours = [manifest for manifest in chain if manifest.run_id == services.run.run_id]
    for manifest in ours if services.tracker.is_fresh else ours[-1:]:
        services.background.submit(functools.partial(track_numbers, manifest, services))
    for manifest in [manifest for manifest in ours if manifest.evaluated][-1:]:
        services.background.submit(functools.partial(services.pages.log, manifest))


def track_receipt(iteration: int, receipt: Receipt, services: Services) -> None:
    """Send the metrics of a stage that belongs to a leg to the tracker, as of now. No manifest has them."""
    if receipt.metrics:
        services.tracker.log_metrics(iteration, receipt.metrics, datetime.now(UTC))
