"""evaluate: greedy accuracy on held-out problems."""

from roll_core.types.manifest import Evaluated, Updated
from tasks.durability import pure
from tasks.services import Services


@pure("evaluate {updated.iteration}")
def evaluate(updated: Updated, services: Services) -> Evaluated:
    return services.fleet.evaluate(updated.weights_version)
