"""checkpoint: weights and optimizer state into the store, beside what follows."""

from roll_core.types.manifest import Checkpointing, Published, Receipt, Updated
from tasks.durability import state_changing
from tasks.services import Services


@state_changing("checkpoint {updated.iteration}")
def checkpoint(updated: Updated, published: Published, services: Services) -> Checkpointing:
    services.fleet.checkpoint(updated.iteration, published)
    return Checkpointing(iteration=updated.iteration)


@state_changing("store checkpoint")
def store_checkpoint(services: Services) -> Receipt:
    """Wait for what is being stored: the first checkpoint, without which there is nothing to resume, and the last."""
    stored = services.fleet.store_checkpoint()
    services.fleet.retire_checkpoints()
    return Receipt(metrics={"checkpoint/megabytes": stored.size / 1e6} if stored else {})
