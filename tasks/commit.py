"""Task `commit`, the last stage of an iteration: create its manifest. Used by `flows/train_leg.py`.

An iteration has happened once its manifest exists, and not before.
"""

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from roll_core.config.exactness import has_exact_updates
from roll_core.provenance import code_version
from roll_core.store.records.runs import commit as commit_manifest
from roll_core.types.manifest import (
    NO_PARENT,
    Checkpointing,
    Evaluated,
    Manifest,
    Metrics,
    Prepared,
    Published,
    Receipt,
    Updated,
)
from roll_core.types.refs import record_digest
from tasks.durability import state_changing
from tasks.services import Services
from tasks.tracking import track


@dataclass(frozen=True)
class IterationReceipts:
    """Receipts of one iteration's stages; None for a stage that was not due. Iteration 0 has no `prepared`."""

    prepared: Prepared | None
    critic_updated: Receipt | None
    updated: Updated
    published: Published
    evaluated: Evaluated | None
    saving: Checkpointing | None

    def by_stage(self) -> dict[str, Receipt]:
        """Map stage name to receipt, for the stages that ran."""
        receipts: dict[str, Receipt | None] = {
            "collect": self.prepared.collected if self.prepared else None,
            "prepare": self.prepared,
            "update_critic": self.critic_updated,
            "update" if self.prepared else "warm_start": self.updated,
            "publish": self.published,
            "evaluate": self.evaluated,
            "checkpoint": self.saving,
        }
        return {stage: receipt for stage, receipt in receipts.items() if receipt is not None}


@state_changing("commit {iteration.updated.iteration}")
def commit(parent: Manifest | None, iteration: IterationReceipts, services: Services) -> Manifest:
    """Commit an iteration: wait until its artifacts are stored, create its manifest, and send its metrics to the tracker.

    `parent` is the manifest of the iteration before; None for iteration 0.
    """
    collected = iteration.prepared.collected if iteration.prepared else None
    timings = {stage: receipt.seconds for stage, receipt in iteration.by_stage().items()}
    timings["wall"] = time.monotonic() - services.iteration_began_at
    manifest = Manifest(
        run_id=services.run.run_id,
        iteration=iteration.updated.iteration,
        parent=record_digest(parent) if parent else NO_PARENT,
        config_digest=services.run.config_digest,
        leg=services.leg,
        weights_version=iteration.updated.weights_version,
        weights_digest=iteration.published.weights_digest,
        next_problem=iteration.prepared.draws.next if iteration.prepared else 0,
        draws=iteration.prepared.draws if iteration.prepared else None,
        controllers=iteration.updated.controllers,
        code=code_version(),
        nodes=services.fleet.nodes,
        exact=has_exact_updates(services.config),
        collected=collected,
        evaluated=iteration.evaluated,
        metrics=_metrics(iteration, timings),
        timings=timings,
        committed_at=datetime.now(UTC).isoformat(),
    )
    services.fleet.wait_until_stored(manifest.artifacts)
    services.fleet.raise_if_storing_failed()
    commit_manifest(services.store, manifest)
    services.fleet.on_committed(manifest.next_problem)
    services.holds_committed_weights = True
    services.iteration_began_at = time.monotonic()
    track(manifest, services)
    return manifest


def _metrics(iteration: IterationReceipts, timings: dict[str, float]) -> Metrics:
    """Merge the metrics of all stages, and add the throughput of the iteration."""
    metrics: Metrics = {}
    for receipt in iteration.by_stage().values():
        metrics |= receipt.metrics
    if iteration.prepared:
        num_tokens = iteration.prepared.collected.num_tokens
        metrics["throughput/tokens_per_second"] = num_tokens / timings["wall"]
        metrics["throughput/rollout_tokens_per_second"] = num_tokens / timings["collect"]
        trained = sum(timings.get(stage, 0.0) for stage in ("prepare", "update_critic", "update"))
        metrics["throughput/trainer_idle"] = 1.0 - trained / timings["wall"]
    return metrics
