"""Task `replay`: replay the update of a committed iteration from its stored rollouts, and compare it with its manifest."""

from typing import TYPE_CHECKING

from roll_core.store.object_store import ObjectStore
from roll_core.types.manifest import Difference, Manifest, Replayed
from tasks.durability import state_changing
from tasks.recover import replay_update, restore_trainer

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet

COMPARED = ("update/loss", "update/gradient_norm", "critic/loss")
"""Metrics of an update that are compared, besides the digest of the resulting weights."""


@state_changing("replay {iteration}")
def replay(chain: list[Manifest], iteration: int, store: ObjectStore, fleet: "Fleet") -> Replayed:
    """Restore the trainer to the policy before an iteration, replay the iteration's update, and compare the two."""
    committed = chain[iteration]
    restore_trainer(chain[:iteration], store, fleet)
    metrics = replay_update(committed, fleet)
    pairs = {name: (str(committed.metrics[name]), str(metrics[name])) for name in COMPARED if name in committed.metrics}
    if committed.weights_digest:
        pairs["weights digest"] = (committed.weights_digest, fleet.weights_digest())
    differences = [Difference(quantity=k, committed=a, replayed=b) for k, (a, b) in pairs.items() if a != b]
    return Replayed(
        run_id=committed.run_id, iteration=iteration, compared=tuple(pairs), differences=tuple(differences), metrics=metrics
    )
