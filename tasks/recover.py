"""Task `recover`: bring the roles of a new leg to the policy of the run's last manifest. Used by `flows/train_leg.py`.

It loads the last checkpoint and replays the updates committed since then from their stored rollouts. Nothing is generated
twice.
"""

import logging
from typing import TYPE_CHECKING

from roll_core.config.run import RunConfig
from roll_core.provenance import code_version
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_to_resume
from roll_core.store.records.forks import check_origin_exists
from roll_core.types.manifest import Manifest, Metrics, Receipt
from tasks.durability import state_changing
from tasks.services import Services

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet

log = logging.getLogger(__name__)


@state_changing("recover")
def recover(chain: list[Manifest], services: Services) -> Receipt:
    """Bring trainer and engines to the policy of the last manifest of a run's complete chain."""
    check_origin_exists(services.store, chain, services.config.forked_from)
    num_replayed, last = restore_trainer(chain, services.store, services.fleet), chain[-1]
    published = services.fleet.publish(last.weights_version)
    is_exact = published.weights_digest == last.weights_digest
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
    """Load the last checkpoint of a chain into the trainer and replay the updates since; return their number."""
    checkpoints = checkpoints_to_resume(store, chain)
    fleet.restore(checkpoints[-1], checkpoints[0])
    to_replay = [manifest for manifest in chain if manifest.iteration > checkpoints[-1].iteration]
    for manifest in to_replay:
        replay_update(manifest, fleet)
    return len(to_replay)


def replay_update(manifest: Manifest, fleet: "Fleet") -> Metrics:
    """Replay the updates of a committed iteration from its stored rollouts; return their metrics."""
    assert manifest.collected is not None, "iteration 0 collected nothing to learn from"
    fleet.prepare(manifest.collected)
    critic = fleet.update_critic(manifest.collected) if fleet.has_critic else {}
    return critic | fleet.update(manifest.collected).metrics
