"""update: the policy moves. update_critic: the critic does. warm_start: supervised steps before the first iteration."""

import logging

from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.mismatch import MismatchConfig
from roll_core.types.manifest import Prepared, Receipt, Updated
from tasks.durability import state_changing
from tasks.services import Services

log = logging.getLogger(__name__)


@state_changing("update {prepared.collected.request.iteration}")
def update(prepared: Prepared, services: Services) -> Updated:
    updated = services.fleet.update(prepared.collected)
    say_if_sampler_disagrees(updated, services.config.training.agreement)
    say_if_experts_are_uneven(updated, services.config.training.experts)
    return updated


@state_changing("update_critic {prepared.collected.request.iteration}")
def update_critic(prepared: Prepared, services: Services) -> Receipt:
    return Receipt(metrics=services.fleet.update_critic(prepared.collected))


@state_changing("warm_start")
def warm_start(services: Services) -> Updated:
    return Updated(iteration=0, weights_version=0, metrics=services.fleet.warm_start())


def say_if_sampler_disagrees(updated: Updated, limits: MismatchConfig | None) -> None:
    """One sentence for an iteration that was trained on beyond the limits."""
    complaint = limits.complaint(updated.metrics) if limits is not None else None
    if limits is not None and complaint is not None:
        log.warning("iteration %d (training.agreement.action %s): %s", updated.iteration, limits.action, complaint)


def say_if_experts_are_uneven(updated: Updated, limits: ExpertsConfig | None) -> None:
    complaint = limits.complaint(updated.metrics) if limits is not None else None
    if complaint is not None:
        log.warning("iteration %d: %s", updated.iteration, complaint)
