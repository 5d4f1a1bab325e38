"""prepare: advantages, the logprobs the algorithm declares, packing."""

from roll_core.types.manifest import Collected, Prepared
from tasks.durability import pure
from tasks.services import Services


@pure("prepare {collected.request.iteration}")
def prepare(collected: Collected, services: Services) -> Prepared:
    return services.fleet.prepare(collected)
