"""publish: engines adopt the weights the trainer now holds."""

from roll_core.types.manifest import Published, Updated
from tasks.durability import state_changing
from tasks.services import Services


@state_changing("publish {updated.iteration}")
def publish(updated: Updated, services: Services) -> Published:
    return services.fleet.publish(updated.weights_version)
