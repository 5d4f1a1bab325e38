"""recover: a new leg takes up a run where its last manifest left it.

The last checkpoint is loaded and the updates committed since are replayed from their stored rollouts: nothing is generated
twice.
"""

from typing import TYPE_CHECKING

from roll_core.store.checkpoints import checkpoints_to_resume
from roll_core.store.fork import refuse_without_origin
from roll_core.store.object_store import ObjectStore
from roll_core.types.manifest import Manifest, Metrics, Receipt
from tasks.durability import state_changing
from tasks.services import Services

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet


@state_changing("recover")
def recover(chain: list[Manifest], services: Services) -> Receipt:
    """Bring trainer and engines to the policy of the last manifest of a whole chain."""
    refuse_without_origin(services.store, chain, services.config.forked_from)
    num_replayed = bring_trainer_to(chain, services.store, services.fleet)
    services.fleet.publish(chain[-1].weights_version)
    return Receipt(metrics={"recover/replayed_iterations": num_replayed})


def bring_trainer_to(chain: list[Manifest], store: ObjectStore, fleet: "Fleet") -> int:
    """Load the last checkpoint of a chain and make the updates since again; how many there were."""
    checkpoints = checkpoints_to_resume(store, chain)
    fleet.restore(checkpoints[-1], checkpoints[0])
    to_replay = [manifest for manifest in chain if manifest.iteration > checkpoints[-1].iteration]
    for manifest in to_replay:
        learn_again(manifest, fleet)
    return len(to_replay)


def learn_again(manifest: Manifest, fleet: "Fleet") -> Metrics:
    """The updates of a committed iteration, from its stored rollouts."""
    assert manifest.collected is not None, "iteration 0 collected nothing to learn from"
    fleet.prepare(manifest.collected)
    critic = fleet.update_critic(manifest.collected) if fleet.has_critic else {}
    return critic | fleet.update(manifest.collected)
