"""update: the policy moves. update_critic: the critic does. warm_start: supervised steps before the first iteration."""

from roll_core.types.manifest import Prepared, Receipt, Updated
from tasks.durability import state_changing
from tasks.services import Services


@state_changing("update {prepared.collected.request.iteration}")
def update(prepared: Prepared, services: Services) -> Updated:
    return services.fleet.update(prepared.collected)


@state_changing("update_critic {prepared.collected.request.iteration}")
def update_critic(prepared: Prepared, services: Services) -> Receipt:
    return Receipt(metrics=services.fleet.update_critic(prepared.collected))


@state_changing("warm_start")
def warm_start(services: Services) -> Updated:
    return Updated(iteration=0, weights_version=0, metrics=services.fleet.warm_start())
