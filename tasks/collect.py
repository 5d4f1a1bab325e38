"""collect: the next groups of problems, generated and graded."""

from roll_core.types.manifest import Collected, CollectRequest
from tasks.durability import pure
from tasks.services import Services


@pure("collect {request.iteration}")
def collect(request: CollectRequest, services: Services) -> Collected:
    return services.fleet.collect(request)
