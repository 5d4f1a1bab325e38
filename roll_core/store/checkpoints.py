"""Checkpoint folders to and from the store, several files at a time. What is in the files is the trainer's business."""

from pathlib import Path

from roll_core.store.object_store import ObjectStore
from roll_core.types.refs import ArtifactKind, CheckpointFile, CheckpointRef


def upload_files(store: ObjectStore, folder: Path, files: list[Path]) -> list[CheckpointFile]:
    """Put files of a checkpoint folder into the store by digest, named by their path in the folder."""
    artifacts = store.put_files(files, ArtifactKind.CHECKPOINT_FILE)
    names = [file.relative_to(folder).as_posix() for file in files]
    return [CheckpointFile(name=name, artifact=artifact) for name, artifact in zip(names, artifacts, strict=True)]


def download_files(store: ObjectStore, checkpoint: CheckpointRef, folder: Path) -> None:
    """Lay a checkpoint's files out again in a folder, each verified."""
    store.get_files((file.artifact, folder / file.name) for file in checkpoint.files)
