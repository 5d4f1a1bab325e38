"""Checkpoint folders to and from the store, file by file. What is in the files is the trainer's business."""

from pathlib import Path

from roll_core.store.object_store import ObjectStore
from roll_core.types.refs import ArtifactKind, CheckpointFile, CheckpointRef


def upload_files(store: ObjectStore, folder: Path, files: list[Path]) -> list[CheckpointFile]:
    """Put files of a checkpoint folder into the store by digest, named by their path in the folder."""
    return [
        CheckpointFile(
            name=file.relative_to(folder).as_posix(), artifact=store.put(file.read_bytes(), ArtifactKind.CHECKPOINT_FILE)
        )
        for file in files
    ]


def download_files(store: ObjectStore, checkpoint: CheckpointRef, folder: Path) -> None:
    """Lay a checkpoint's files out again in a folder, each verified."""
    for file in checkpoint.files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(file.artifact))
