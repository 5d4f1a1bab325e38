"""Checkpoints in the store: files by digest, and a record created after the last file is stored. No record, no checkpoint.

    runs/quickstart-3/checkpoints/00000010-77d0c2a94e1b.json

A record belongs to the manifest that has its iteration and its weights digest. A leg that lost the race to commit an
iteration may have left a record with another digest, which is ignored. Only the trainer knows what the files contain.
"""

from collections.abc import Sequence
from pathlib import Path

from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import read_chain
from roll_core.store.records.sealed import create_record, read_records
from roll_core.types.manifest import Manifest
from roll_core.types.refs import ArtifactKind, CheckpointFile, CheckpointRef, ExportRef


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


def record_checkpoint(store: ObjectStore, run_id: str, checkpoint: CheckpointRef) -> None:
    """Record a stored checkpoint, which makes it visible. If an earlier leg has recorded it, that record stays."""
    create_record(store, checkpoint_record_name(run_id, checkpoint), checkpoint)


def read_checkpoints(store: ObjectStore, run_id: str) -> list[CheckpointRef]:
    """Read all checkpoint records of a run, sorted by iteration; includes those that lost a commit race."""
    names = [f"runs/{run_id}/checkpoints/{name}" for name in store.list(f"runs/{run_id}/checkpoints")]
    return [checkpoint for checkpoint in read_records(store, names, CheckpointRef) if checkpoint is not None]


def checkpoints_of(store: ObjectStore, chain: Sequence[Manifest]) -> list[CheckpointRef]:
    """Checkpoints of the committed policies of a chain, those of its ancestors included, sorted by iteration."""
    found: list[CheckpointRef] = []
    for run_id in dict.fromkeys(manifest.run_id for manifest in chain):
        theirs = {manifest.iteration: manifest.weights_digest for manifest in chain if manifest.run_id == run_id}
        found += [
            record for record in read_checkpoints(store, run_id) if theirs.get(record.iteration) == record.weights_digest
        ]
    return sorted(found, key=lambda checkpoint: checkpoint.iteration)


def checkpoints_to_resume(store: ObjectStore, chain: Sequence[Manifest]) -> list[CheckpointRef]:
    """Checkpoints of a chain, at least one. Raises ArtifactDamaged if none is left, since every run begins with one."""
    checkpoints = checkpoints_of(store, chain)
    if not checkpoints:
        raise ArtifactDamaged(
            f"store: no checkpoint of {chain[-1].run_id} is left in {store.uri}: restore runs/{chain[0].run_id}/checkpoints "
            "from a copy"
        )
    return checkpoints


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
