"""recover: a new leg takes up a run where its last manifest left it.

The last checkpoint is loaded and the updates committed since are replayed from their stored rollouts: nothing is generated
twice.
"""

from roll_core.types.manifest import Collected, Manifest, Receipt
from tasks.durability import state_changing
from tasks.services import Services


@state_changing("recover")
def recover(chain: list[Manifest], services: Services) -> Receipt:
    """Bring trainer and engines to the policy of the last manifest of a whole chain."""
    checkpoints = [manifest.checkpoint for manifest in chain if manifest.checkpoint is not None]
    services.fleet.restore(checkpoints[-1], checkpoints[0])
    to_replay = [m.collected for m in chain if m.collected is not None and m.iteration > checkpoints[-1].iteration]
    for collected in to_replay:
        _replay(collected, services)
    services.fleet.publish(chain[-1].weights_version)
    return Receipt(metrics={"recover/replayed_iterations": len(to_replay)})


def _replay(collected: Collected, services: Services) -> None:
    services.fleet.prepare(collected)
    if services.config.algorithm.has_critic:
        services.fleet.update_critic(collected)
    services.fleet.update(collected)
