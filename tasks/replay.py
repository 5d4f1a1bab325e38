"""replay: the update of a committed iteration, made again from its stored rollouts and compared with its manifest."""

from typing import TYPE_CHECKING

from roll_core.store.object_store import ObjectStore
from roll_core.types.manifest import Difference, Manifest, Replayed
from tasks.durability import state_changing
from tasks.recover import bring_trainer_to, learn_again

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet

COMPARED = ("update/loss", "update/gradient_norm", "critic/loss")
"""What of an update is compared, beside the digest of the weights it led to."""


@state_changing("replay {iteration}")
def replay(chain: list[Manifest], iteration: int, store: ObjectStore, fleet: "Fleet") -> Replayed:
    """Bring the trainer to the policy before an iteration, make its update again, and compare."""
    committed = chain[iteration]
    bring_trainer_to(chain[:iteration], store, fleet)
    metrics = learn_again(committed, fleet)
    pairs = {name: (str(committed.metrics[name]), str(metrics[name])) for name in COMPARED if name in committed.metrics}
    if committed.weights_digest:
        pairs["weights digest"] = (committed.weights_digest, fleet.weights_digest())
    differences = [Difference(quantity=k, committed=a, replayed=b) for k, (a, b) in pairs.items() if a != b]
    return Replayed(
        run_id=committed.run_id, iteration=iteration, compared=tuple(pairs), differences=tuple(differences), metrics=metrics
    )
