"""Export tasks: write a policy as a Hugging Face folder.

`flows/train_leg.py` stores one at the end of a run; `flows/export.py` writes one to disk on demand.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_of
from roll_core.store.records.exports import find_export
from roll_core.types.manifest import Manifest, Receipt
from tasks.durability import state_changing
from tasks.services import Services

if TYPE_CHECKING:
    from roll_core.roles.fleet import Fleet


@state_changing("store export {manifest.iteration}")
def store_export(manifest: Manifest, services: Services) -> Receipt:
    """Store the export of the run's last policy, unless an earlier leg has stored it."""
    stored = find_export(services.store, manifest) or services.fleet.store_export(manifest)
    return Receipt(metrics={"export/megabytes": stored.size / 1e6} if stored else {})


@state_changing("export")
def write_export(chain: list[Manifest], store: ObjectStore, folder: Path, fleet: "Fleet") -> Receipt:
    """Write the policy of a chain's last manifest to a folder. That manifest must have a checkpoint.

    Raise ArtifactDamaged if the digest of the written weights is not the one that was committed.
    """
    exported = [checkpoint for checkpoint in checkpoints_of(store, chain) if checkpoint.iteration == chain[-1].iteration]
    assert exported, "exported from a checkpoint, not from a replay"
    fleet.restore(exported[-1])
    digest, committed = fleet.export(folder), chain[-1].weights_digest
    if committed and digest != committed:
        raise ArtifactDamaged(f"the policy in {folder} is {digest[:12]}, and {committed[:12]} was committed: do not use it")
    return Receipt()
