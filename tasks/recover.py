"""Task `recover`: bring the roles of a new leg to the policy of the run's last manifest. Used by `flows/train_leg.py`.

It loads the last checkpoint and replays the updates committed since then from their stored rollouts. Nothing is generated
twice. If that checkpoint is damaged, it is marked and the one before is loaded: replaying further leads to the same bits.
"""

import logging
from typing import TYPE_CHECKING

from roll_core.config.run import RunConfig
from roll_core.errors import ArtifactDamaged, RollError
from roll_core.provenance import code_version
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import OwnedCheckpoint, clear_damage, mark_damaged, reference_checkpoint
from roll_core.store.records.forks import checkpoints_from_origin
from roll_core.types.manifest import Manifest, Metrics, Receipt
from roll_core.types.refs import CheckpointRef
from tasks.durability import state_changing
from tasks.services import Services

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet

log = logging.getLogger(__name__)


@state_changing("recover")
def recover(chain: list[Manifest], services: Services) -> Receipt:
    """Bring trainer and engines to the policy of the last manifest of a run's complete chain."""
    num_replayed, last = restore_trainer(chain, services.store, services.fleet), chain[-1]
    published = services.fleet.publish(last.weights_version)
    is_exact = published.weights_digest == last.weights_digest
    services.holds_committed_weights = is_exact
    if not is_exact:
        log.warning(
            "%s goes on from weights %s, committed were %s: other hardware or code rounds differently (made by %s, now %s)",
            *(last.run_id, published.weights_digest[:12], last.weights_digest[:12], last.code, code_version()),
        )
    elif is_checkpoint_overdue(last, num_replayed, services.config):
        services.fleet.checkpoint(last.iteration, published)
    return Receipt(metrics={"recover/replayed_iterations": num_replayed, "recover/exact": float(is_exact)})


def is_checkpoint_overdue(last: Manifest, num_replayed: int, config: RunConfig) -> bool:
    """True if a checkpoint was due among the replayed iterations. Its leg died before the checkpoint was stored."""
    return num_replayed >= config.checkpoint.every or (num_replayed > 0 and last.iteration == config.iterations)


def restore_trainer(chain: list[Manifest], store: ObjectStore, fleet: "Fleet") -> int:
    """Load the last undamaged checkpoint of a chain into the trainer and replay the updates since; return their number."""
    if fleet.needs_reference:
        fleet.load_reference(reference_checkpoint(store, chain))
    restored = _restore_newest(checkpoints_from_origin(store, chain, fleet.origin), store, fleet)
    to_replay = [manifest for manifest in chain if manifest.iteration > restored.iteration]
    for manifest in to_replay:
        replay_update(manifest, fleet)
    return len(to_replay)


def _restore_newest(candidates: list[OwnedCheckpoint], store: ObjectStore, fleet: "Fleet") -> CheckpointRef:
    """Load the first candidate that is not damaged, and mark those that are. Raise the last error if all are."""
    for number, candidate in enumerate(candidates, 1):
        try:
            fleet.restore(candidate.checkpoint)
        except ArtifactDamaged as error:
            _mark(candidate, error, store)
            if number == len(candidates):
                raise
        else:
            clear_damage(store, candidate)
            return candidate.checkpoint
    raise AssertionError("there is at least one candidate")


def _mark(damaged: OwnedCheckpoint, error: ArtifactDamaged, store: ObjectStore) -> None:
    """Mark a checkpoint as damaged. A store that cannot be written to does not end a recovery."""
    iteration = damaged.checkpoint.iteration
    log.warning("the checkpoint of %s@%d is damaged and not used: %s", damaged.run_id, iteration, error)
    try:
        mark_damaged(store, damaged, str(error))
    except RollError as failure:
        log.warning("the checkpoint of %s@%d could not be marked: %s", damaged.run_id, iteration, failure)


def replay_update(manifest: Manifest, fleet: "Fleet") -> Metrics:
    """Replay the updates of a committed iteration from its stored rollouts; return their metrics."""
    assert manifest.collected is not None, "iteration 0 collected nothing to learn from"
    fleet.prepare(manifest.collected)
    critic = fleet.update_critic(manifest.collected) if fleet.has_critic else {}
    return critic | fleet.update(manifest.collected).metrics
