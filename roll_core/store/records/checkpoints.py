"""Checkpoints: files by digest, and a record that is created once the last of them is stored. No record, no checkpoint.

    runs/quickstart-3/checkpoints/00000010-77d0c2a94e1b.json

A record belongs to an iteration's manifest by the digest of the weights, so that what a leg left that lost a race for the
iteration is never taken for the run's. What is in the files is the trainer's business.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from roll_core.errors import ArtifactDamaged
from roll_core.store.media.medium import in_order
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.store.records.runs import read_chain, read_manifest
from roll_core.store.records.sealed import create_sealed, read_record
from roll_core.types.manifest import Manifest
from roll_core.types.refs import ArtifactKind, CheckpointFile, CheckpointRef, ExportRef, record_json

RECORDS_IN_FLIGHT = 16


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
    """Make a checkpoint be one. If a leg before this one has made the same, that stands."""
    try:
        create_sealed(store, record_name(run_id, checkpoint), record_json(checkpoint, indent=1))
    except AlreadyExists:
        return


def read_records(store: ObjectStore, run_id: str) -> list[CheckpointRef]:
    """Every checkpoint a run's legs recorded and that was not retired, by iteration."""
    names = [f"runs/{run_id}/checkpoints/{name}" for name in store.list(f"runs/{run_id}/checkpoints")]
    found = in_order(partial(_read_if_there, store), names, RECORDS_IN_FLIGHT)
    return [record for record in found if record is not None]


def checkpoints_of(store: ObjectStore, chain: Sequence[Manifest]) -> list[CheckpointRef]:
    """Checkpoints of the policies a chain went through, its ancestors' included, by iteration."""
    found = [manifest.checkpoint for manifest in chain if manifest.checkpoint is not None]
    for run_id in dict.fromkeys(manifest.run_id for manifest in chain):
        theirs = {manifest.iteration: manifest.weights_digest for manifest in chain if manifest.run_id == run_id}
        found += [record for record in read_records(store, run_id) if theirs.get(record.iteration) == record.weights_digest]
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


def named_checkpoints(store: ObjectStore, run_id: str) -> list[CheckpointRef]:
    """Every checkpoint a run's own records and manifests name, on its chain or not. Only a run that began with version 0.1.0
    has any in its manifests: its first one tells."""
    first = next(iter(store.list(f"runs/{run_id}/iterations")), None)
    manifest = read_manifest(store, run_id, int(first.removesuffix(".json"))) if first else None
    old = read_chain(store, run_id) if manifest is not None and manifest.checkpoint is not None else []
    return [each.checkpoint for each in old if each.checkpoint is not None] + read_records(store, run_id)


def _read_if_there(store: ObjectStore, name: str) -> CheckpointRef | None:
    """A record may be retired between being listed and being read."""
    try:
        return read_record(store, name, CheckpointRef)
    except FileNotFoundError:
        return None


def record_name(run_id: str, checkpoint: CheckpointRef) -> str:
    return f"runs/{run_id}/checkpoints/{checkpoint.iteration:08d}-{checkpoint.weights_digest[:12]}.json"


def mark_name(run_id: str, checkpoint: CheckpointRef) -> str:
    """What says that a checkpoint is about to go."""
    return record_name(run_id, checkpoint).replace("/checkpoints/", "/retiring/")
