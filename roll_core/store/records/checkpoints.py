"""Checkpoints: files by digest, and a record that is created once the last of them is stored. No record, no checkpoint.

    runs/quickstart-3/checkpoints/00000010-77d0c2a94e1b.json

A record belongs to an iteration's manifest by the digest of the weights, so that what a leg left that lost a race for the
iteration is never taken for the run's. What is in the files is the trainer's business.
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
    """Put files of a folder into the store by digest, named by their path in the folder."""
    artifacts = store.put_files(files, kind)
    names = [file.relative_to(folder).as_posix() for file in files]
    return [CheckpointFile(name=name, artifact=artifact) for name, artifact in zip(names, artifacts, strict=True)]


def download_files(store: ObjectStore, stored: CheckpointRef | ExportRef, folder: Path) -> None:
    """Lay stored files out again in a folder, each verified."""
    store.get_files((file.artifact, folder / file.name) for file in stored.files)


def record_checkpoint(store: ObjectStore, run_id: str, checkpoint: CheckpointRef) -> None:
    """Record a stored checkpoint, which makes it visible. A record that an earlier leg created stands."""
    create_record(store, checkpoint_record_name(run_id, checkpoint), checkpoint)


def read_checkpoints(store: ObjectStore, run_id: str) -> list[CheckpointRef]:
    """Every checkpoint a run's legs recorded and that was not retired, by iteration."""
    names = [f"runs/{run_id}/checkpoints/{name}" for name in store.list(f"runs/{run_id}/checkpoints")]
    return [checkpoint for checkpoint in read_records(store, names, CheckpointRef) if checkpoint is not None]


def checkpoints_of(store: ObjectStore, chain: Sequence[Manifest]) -> list[CheckpointRef]:
    """Checkpoints of the policies a chain went through, its ancestors' included, by iteration."""
    found: list[CheckpointRef] = []
    for run_id in dict.fromkeys(manifest.run_id for manifest in chain):
        theirs = {manifest.iteration: manifest.weights_digest for manifest in chain if manifest.run_id == run_id}
        found += [
            record for record in read_checkpoints(store, run_id) if theirs.get(record.iteration) == record.weights_digest
        ]
    return sorted(found, key=lambda checkpoint: checkpoint.iteration)


def checkpoints_to_resume(store: ObjectStore, chain: Sequence[Manifest]) -> list[CheckpointRef]:
    """At least one: a run without any was never begun, so they were lost."""
    checkpoints = checkpoints_of(store, chain)
    if not checkpoints:
        raise ArtifactDamaged(
            f"store: no checkpoint of {chain[-1].run_id} is left in {store.uri}: restore runs/{chain[0].run_id}/checkpoints "
            "from a copy"
        )
    return checkpoints


def checkpoint_iterations(store: ObjectStore, run_id: str) -> list[int]:
    """Iterations of a run after which it can be continued by others: with a checkpoint that is not being retired.

    Whoever is about to depend on one asks again once its own config is stored (`retention.py` says why).
    """
    chain = read_chain(store, run_id)
    maker = {manifest.iteration: manifest.run_id for manifest in chain}
    leaving = {
        f"runs/{each}/retiring/{name}" for each in set(maker.values()) for name in store.list(f"runs/{each}/retiring")
    }
    found = checkpoints_of(store, chain)
    return [each.iteration for each in found if mark_name(maker[each.iteration], each) not in leaving]


def checkpoint_record_name(run_id: str, checkpoint: CheckpointRef) -> str:
    return f"runs/{run_id}/checkpoints/{checkpoint.iteration:08d}-{checkpoint.weights_digest[:12]}.json"


def mark_name(run_id: str, checkpoint: CheckpointRef) -> str:
    """What says that a checkpoint is about to go."""
    return checkpoint_record_name(run_id, checkpoint).replace("/checkpoints/", "/retiring/")
