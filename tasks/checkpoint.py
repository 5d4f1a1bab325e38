"""checkpoint: weights and optimizer state into the store."""

from roll_core.types.manifest import Checkpointed, Updated
from tasks.durability import state_changing
from tasks.services import Services


@state_changing("checkpoint {updated.iteration}")
def checkpoint(updated: Updated, services: Services) -> Checkpointed:
    reference = services.fleet.checkpoint(updated.iteration, updated.weights_version)
    return Checkpointed(checkpoint=reference, metrics={"checkpoint/megabytes": reference.size / 1e6})
