"""Stages of one iteration as tasks, in the order `flows/train_leg.py` runs them. `commit.py` holds the last stage."""

import logging

from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.mismatch import MismatchConfig
from roll_core.store.records.checkpoints import checkpoints_of
from roll_core.types.manifest import (
    Checkpointing,
    Collected,
    CollectRequest,
    Evaluated,
    Manifest,
    Prepared,
    Published,
    Receipt,
    Updated,
)
from tasks.durability import pure, state_changing
from tasks.services import Services

log = logging.getLogger(__name__)


@state_changing("warm_start")
def warm_start(services: Services) -> Updated:
    """Run the supervised steps before the first iteration."""
    return Updated(iteration=0, weights_version=0, metrics=services.fleet.warm_start())


@pure("collect {request.iteration}")
def collect(request: CollectRequest, services: Services) -> Collected:
    """Generate and grade the requested groups; store them as one batch."""
    return services.fleet.collect(request)


@pure("prepare {collected.request.iteration}")
def prepare(collected: Collected, services: Services) -> Prepared:
    """Compute advantages and the logprobs that the algorithm declares; pack the batch into micro-batches."""
    return services.fleet.prepare(collected)


@state_changing("update_critic {prepared.collected.request.iteration}")
def update_critic(prepared: Prepared, services: Services) -> Receipt:
    """Take the critic's optimizer steps over the prepared batch."""
    services.holds_committed_weights = False
    return Receipt(metrics=services.fleet.update_critic(prepared.collected))


@state_changing("update {prepared.collected.request.iteration}")
def update(prepared: Prepared, services: Services) -> Updated:
    """Take the policy's optimizer steps over the prepared batch."""
    services.holds_committed_weights = False
    updated = services.fleet.update(prepared.collected)
    warn_of_mismatch(updated, services.config.training.mismatch)
    warn_of_uneven_experts(updated, services.config.training.experts)
    return updated


def warn_of_mismatch(updated: Updated, limits: MismatchConfig | None) -> None:
    """Log one warning if an update trained on sampler logprobs beyond the limits of `training.mismatch`."""
    complaint = limits.exceeded_limit(updated.metrics) if limits is not None else None
    if limits is not None and complaint is not None:
        log.warning("iteration %d (training.mismatch.action %s): %s", updated.iteration, limits.action, complaint)


def warn_of_uneven_experts(updated: Updated, limits: ExpertsConfig | None) -> None:
    """Log one warning if the busiest expert is above `training.experts.max_load`."""
    complaint = limits.exceeded_limit(updated.metrics) if limits is not None else None
    if complaint is not None:
        log.warning("iteration %d: %s", updated.iteration, complaint)


@state_changing("publish {updated.iteration}")
def publish(updated: Updated, services: Services) -> Published:
    """Send the trainer's weights to every engine."""
    return services.fleet.publish(updated.weights_version)


@pure("evaluate {updated.iteration}")
def evaluate(updated: Updated, services: Services) -> Evaluated:
    """Measure greedy accuracy on held-out problems."""
    return services.fleet.evaluate(updated.weights_version)


@state_changing("checkpoint {updated.iteration}")
def checkpoint(updated: Updated, published: Published, services: Services) -> Checkpointing:
    """Snapshot weights and optimizer state; the upload to the store runs beside the stages that follow."""
    services.fleet.checkpoint(updated.iteration, published)
    return Checkpointing(iteration=updated.iteration)


@state_changing("checkpoint {manifest.iteration}")
def checkpoint_committed(manifest: Manifest, services: Services) -> Receipt:
    """Checkpoint the last committed iteration, unless it has a checkpoint. Called when a leg is about to end.

    After a recovery that was not exact, the trainer holds other weights until the next commit: they are not stored as those
    of the manifest.
    """
    services.fleet.wait_for_checkpoint()
    if not services.holds_committed_weights:
        log.warning("iteration %d gets no checkpoint: other weights were recovered than committed", manifest.iteration)
    elif not checkpoints_of(services.store, [manifest]):
        published = Published(weights_version=manifest.weights_version, weights_digest=manifest.weights_digest, num_bytes=0)
        services.fleet.checkpoint(manifest.iteration, published)
    return Receipt()


@state_changing("store checkpoint")
def store_checkpoint(services: Services) -> Receipt:
    """Wait until the pending checkpoint is stored, then retire old checkpoints.

    A run waits for its first checkpoint, without which it could not resume, and each leg for its last.
    """
    stored = services.fleet.wait_for_checkpoint()
    services.fleet.retire_checkpoints()
    return Receipt(metrics={"checkpoint/megabytes": stored.size / 1e6} if stored else {})
