"""Checkpoints in the store: files by digest, and a record created after the last file is stored. No record, no checkpoint.

    runs/quickstart-3/checkpoints/00000010-77d0c2a94e1b.json

A record belongs to the manifest that has its iteration and its weights digest. A leg that lost the race to commit an
iteration may have left a record with another digest, which is ignored. Only the trainer knows what the files contain.

    runs/quickstart-3/damaged/00000010-77d0c2a94e1b.json

A marker of this name says that a recovery found the checkpoint damaged. Later recoveries try it last, and retention does not
count it among the checkpoints it keeps.
"""

import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from roll_core.errors import ArtifactDamaged
from roll_core.store.media.medium import map_in_order
from roll_core.store.object_store import FILES_IN_FLIGHT, AlreadyExists, ObjectStore, object_name
from roll_core.store.records.listing import ITERATION_AND_DIGEST, list_matching
from roll_core.store.records.runs import chain_owners, read_chain, read_manifest
from roll_core.store.records.sealed import RECORDS_IN_FLIGHT, create_record, read_record, read_records, replace_sealed
from roll_core.types.manifest import Manifest
from roll_core.types.refs import ArtifactKind, CheckpointFile, CheckpointRef, ExportRef, record_json

log = logging.getLogger(__name__)


class OwnedCheckpoint(NamedTuple):
    """Checkpoint with the run that made it: an ancestor, for the early iterations of a fork."""

    run_id: str
    checkpoint: CheckpointRef


def upload_files(
    store: ObjectStore, folder: Path, files: list[Path], kind: ArtifactKind = ArtifactKind.CHECKPOINT_FILE
) -> list[CheckpointFile]:
    """Store files of a folder by digest; each returned entry has the file's path relative to `folder`."""
    artifacts = store.put_files(files, kind)
    names = [file.relative_to(folder).as_posix() for file in files]
    return [CheckpointFile(name=name, artifact=artifact) for name, artifact in zip(names, artifacts, strict=True)]


def download_files(store: ObjectStore, stored: CheckpointRef | ExportRef, folder: Path) -> None:
    """Download the files of a checkpoint or export into a folder, each verified."""
    store.get_files((file.artifact, folder / file.name) for file in stored.files)


def put_missing_files(store: ObjectStore, folder: Path, files: Sequence[CheckpointFile]) -> None:
    """Store again, from the folder they were stored from, those files that are missing from the store."""

    def put_if_missing(file: CheckpointFile) -> None:
        if not store.exists(file.artifact) and (folder / file.name).is_file():
            log.warning("%s was removed from the store before a record named it: put again", object_name(file.artifact))
            store.put_file(folder / file.name, file.artifact.kind)

    list(map_in_order(put_if_missing, files, FILES_IN_FLIGHT))


def touch_files(store: ObjectStore, files: Sequence[CheckpointFile]) -> None:
    """Restart the age of stored files, so that garbage collection keeps them until a record names them."""
    list(map_in_order(lambda file: store.touch(file.artifact), files, FILES_IN_FLIGHT))


def record_checkpoint(store: ObjectStore, run_id: str, checkpoint: CheckpointRef) -> None:
    """Record a stored checkpoint, which makes it visible. Raises ArtifactDamaged if one of its files is not stored.

    If an earlier leg has recorded it, that record stays, unless it is marked as damaged.
    """
    artifacts = [file.artifact for file in checkpoint.files]
    for artifact, exists in zip(artifacts, map_in_order(store.exists, artifacts, RECORDS_IN_FLIGHT), strict=True):
        if not exists:
            raise ArtifactDamaged(
                f"store: {object_name(artifact)} is missing from {store.uri}: the checkpoint of iteration "
                f"{checkpoint.iteration} is not recorded"
            )
    name, marker = checkpoint_record_name(run_id, checkpoint), damage_marker_name(run_id, checkpoint)
    if marker in _damage_markers(store, run_id):
        replace_sealed(store, name, record_json(checkpoint, indent=1))
        store.delete(marker)
    else:
        create_record(store, name, checkpoint)


def read_checkpoints(store: ObjectStore, run_id: str) -> list[CheckpointRef]:
    """Read all checkpoint records of a run, sorted by iteration; includes those that lost a commit race."""
    return [record for record in read_records(store, _record_names(store, run_id), CheckpointRef) if record is not None]


def checkpointed_manifests(store: ObjectStore, run_id: str) -> list[Manifest]:
    """Manifests of those iterations of a run's chain that have a checkpoint record, in order. Takes as many requests as
    there are records, however long the chain is."""
    wanted = [
        (owner, iteration)
        for owner, last in reversed(chain_owners(store, run_id))
        for iteration in _recorded_iterations(store, owner)
        if iteration <= last
    ]
    read = map_in_order(lambda key: read_manifest(store, *key), wanted, RECORDS_IN_FLIGHT)
    return [manifest for manifest in read if manifest is not None]


def checkpoints_of(store: ObjectStore, chain: Sequence[Manifest]) -> list[CheckpointRef]:
    """Checkpoints of the committed policies of a chain, those of its ancestors included, sorted by iteration."""
    found: list[CheckpointRef] = []
    for run_id in dict.fromkeys(manifest.run_id for manifest in chain):
        theirs = {manifest.iteration: manifest.weights_digest for manifest in chain if manifest.run_id == run_id}
        found += [
            record for record in read_checkpoints(store, run_id) if theirs.get(record.iteration) == record.weights_digest
        ]
    return sorted(found, key=lambda checkpoint: checkpoint.iteration)


def checkpoints_to_resume(store: ObjectStore, chain: Sequence[Manifest]) -> list[OwnedCheckpoint]:
    """Checkpoints of a chain in the order in which a recovery tries them: newest first, those marked as damaged last.

    A record that cannot be read is left out with a warning. Raises ArtifactDamaged if none is left, since every run begins
    with one.
    """
    run_ids = list(dict.fromkeys(manifest.run_id for manifest in chain))
    markers = {marker for run_id in run_ids for marker in _damage_markers(store, run_id)}
    committed = {(manifest.run_id, manifest.iteration): manifest.weights_digest for manifest in chain}
    found = [
        OwnedCheckpoint(run_id, record)
        for run_id in run_ids
        for record in _readable_checkpoints(store, run_id)
        if committed.get((run_id, record.iteration)) == record.weights_digest
    ]
    if not found:
        raise ArtifactDamaged(
            f"store: no checkpoint of {chain[-1].run_id} is left in {store.uri}: restore runs/{chain[0].run_id}/checkpoints "
            "from a copy"
        )
    return sorted(found, key=lambda each: (damage_marker_name(*each) in markers, -each.checkpoint.iteration))


def reference_checkpoint(store: ObjectStore, chain: Sequence[Manifest]) -> CheckpointRef:
    """Checkpoint of a chain's first manifest, the only one that may serve as reference policy.

    Raises ArtifactDamaged, which names the record, if it is missing: another policy would silently change the objective.
    """
    first = chain[0]
    name = f"runs/{first.run_id}/checkpoints/{first.iteration:08d}-{first.weights_digest[:12]}.json"
    try:
        return read_record(store, name, CheckpointRef)
    except FileNotFoundError:
        raise ArtifactDamaged(
            f"store: {name}, the reference policy of {chain[-1].run_id}, is missing from {store.uri}: restore it from a copy"
        ) from None


def mark_damaged(store: ObjectStore, owned: OwnedCheckpoint, reason: str) -> None:
    """Mark a checkpoint as damaged. The marker holds the reason."""
    with contextlib.suppress(AlreadyExists):
        store.create(damage_marker_name(*owned), reason.encode())


def clear_damage(store: ObjectStore, owned: OwnedCheckpoint) -> None:
    """Remove the damage marker of a checkpoint, if there is one: its files could be read."""
    if damage_marker_name(*owned) in _damage_markers(store, owned.run_id):
        store.delete(damage_marker_name(*owned))


def without_damaged(store: ObjectStore, run_id: str, checkpoints: Sequence[CheckpointRef]) -> list[CheckpointRef]:
    """Checkpoints of a run's chain that its own recoveries have not found damaged."""
    markers = _damage_markers(store, run_id)
    return [checkpoint for checkpoint in checkpoints if damage_marker_name(run_id, checkpoint) not in markers]


def checkpoint_iterations(store: ObjectStore, run_id: str) -> list[int]:
    """Iterations of a run that another run can fork or distill from: they have a checkpoint without a tombstone.

    A new run calls this again after its own config is stored (`upkeep/retention.py` explains the race).
    """
    chain = read_chain(store, run_id)
    owner = {manifest.iteration: manifest.run_id for manifest in chain}
    tombstones = {
        f"runs/{each}/retiring/{name}" for each in set(owner.values()) for name in store.list(f"runs/{each}/retiring")
    }
    found = checkpoints_of(store, chain)
    return [each.iteration for each in found if tombstone_name(owner[each.iteration], each) not in tombstones]


def checkpoint_record_name(run_id: str, checkpoint: CheckpointRef) -> str:
    """Name of a checkpoint's record in the store."""
    return f"runs/{run_id}/checkpoints/{checkpoint.iteration:08d}-{checkpoint.weights_digest[:12]}.json"


def tombstone_name(run_id: str, checkpoint: CheckpointRef) -> str:
    """Name of the object that marks a checkpoint as being retired."""
    return checkpoint_record_name(run_id, checkpoint).replace("/checkpoints/", "/retiring/")


def damage_marker_name(run_id: str, checkpoint: CheckpointRef) -> str:
    """Name of the object that marks a checkpoint as damaged."""
    return checkpoint_record_name(run_id, checkpoint).replace("/checkpoints/", "/damaged/")


def _damage_markers(store: ObjectStore, run_id: str) -> set[str]:
    folder = f"runs/{run_id}/damaged"
    return {f"{folder}/{name}" for name in list_matching(store, folder, ITERATION_AND_DIGEST)}


def _record_names(store: ObjectStore, run_id: str) -> list[str]:
    folder = f"runs/{run_id}/checkpoints"
    return [f"{folder}/{name}" for name in list_matching(store, folder, ITERATION_AND_DIGEST)]


def _recorded_iterations(store: ObjectStore, run_id: str) -> list[int]:
    """Iterations that have a checkpoint record, in order, each once."""
    names = list_matching(store, f"runs/{run_id}/checkpoints", ITERATION_AND_DIGEST)
    return sorted({int(name.partition("-")[0]) for name in names})


def _readable_checkpoints(store: ObjectStore, run_id: str) -> list[CheckpointRef]:
    read = map_in_order(partial(_read_or_warn, store), _record_names(store, run_id), RECORDS_IN_FLIGHT)
    return [record for record in read if record is not None]


def _read_or_warn(store: ObjectStore, name: str) -> CheckpointRef | None:
    """Read a checkpoint record; None, with a warning, if it is damaged, and None if it was deleted since it was listed."""
    try:
        return read_record(store, name, CheckpointRef)
    except ArtifactDamaged as error:
        log.warning("%s; an older checkpoint is used", error)
    except FileNotFoundError:
        pass
    return None
