"""checkpoint: weights and optimizer state into the store, beside what follows."""

from roll_core.store.records.checkpoints import checkpoints_of
from roll_core.types.manifest import Checkpointing, Manifest, Published, Receipt, Updated
from tasks.durability import state_changing
from tasks.services import Services


@state_changing("checkpoint {updated.iteration}")
def checkpoint(updated: Updated, published: Published, services: Services) -> Checkpointing:
    services.fleet.checkpoint(updated.iteration, published)
    return Checkpointing(iteration=updated.iteration)


@state_changing("checkpoint {manifest.iteration}")
def save(manifest: Manifest, services: Services) -> Receipt:
    """A checkpoint of what was committed last, where none was due, for whoever goes on from there."""
    services.fleet.store_checkpoint()
    if not checkpoints_of(services.store, [manifest]):
        published = Published(weights_version=manifest.weights_version, weights_digest=manifest.weights_digest, num_bytes=0)
        services.fleet.checkpoint(manifest.iteration, published)
    return Receipt()


@state_changing("store checkpoint")
def store_checkpoint(services: Services) -> Receipt:
    """Wait for what is being stored: the first checkpoint, without which there is nothing to resume, and the last."""
    stored = services.fleet.store_checkpoint()
    services.fleet.retire_checkpoints()
    return Receipt(metrics={"checkpoint/megabytes": stored.size / 1e6} if stored else {})
