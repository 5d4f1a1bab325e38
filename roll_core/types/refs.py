"""Names of things that live in the store. Everything large is named by the digest of its bytes.

Used by every receipt and manifest; holds no bytes itself.
"""

import hashlib
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of what is written to disk or sent between processes: frozen, and strict about unknown fields."""

    # A metric may be NaN or infinite; as null it could not be read back, and the run could not be resumed.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


def digest_of(data: bytes) -> str:
    """SHA-256 in hexadecimal: the name of an artifact."""
    return hashlib.sha256(data).hexdigest()


def record_json(record: Record, indent: int | None = None) -> bytes:
    """A record as it is stored. Fields that were not set are left out, so that a record written by an earlier version, which
    did not know them, has the same digest when it is read today."""
    return record.model_dump_json(exclude_unset=True, indent=indent).encode()


def record_digest(record: Record) -> str:
    """Digest of a record's stored JSON, for example to name a parent manifest."""
    return digest_of(record_json(record))


class ArtifactKind(StrEnum):
    TRAJECTORIES = "trajectories"
    TRACE = "trace"
    CHECKPOINT_FILE = "checkpoint-file"
    EXPORT_FILE = "export-file"


class ArtifactRef(Record):
    """An immutable object in the store.

    Example: ArtifactRef(kind="trajectories", digest="9f86d081...", size=18433)
    """

    kind: ArtifactKind
    digest: str
    size: int


class CheckpointFile(Record):
    """One file of a checkpoint's or an export's folder, by its name there.

    Example: CheckpointFile(name="__0_0.distcp", artifact=ArtifactRef(...))
    """

    name: str
    artifact: ArtifactRef


class CheckpointRef(Record):
    """Weights and optimizer state after an iteration, as the files of a torch.distributed.checkpoint folder.

    Example: CheckpointRef(iteration=10, weights_version=10, weights_digest="77d0...", files=(CheckpointFile(...), ...))
    """

    iteration: int
    weights_version: int
    weights_digest: str = ""
    """That of the iteration's manifest; "" in those of version 0.1.0, which manifests named themselves."""
    files: tuple[CheckpointFile, ...]

    @property
    def size(self) -> int:
        return sum(file.artifact.size for file in self.files)


class ExportRef(Record):
    """The policy after an iteration as a Hugging Face folder: safetensors, config, tokenizer.

    Example: ExportRef(iteration=40, weights_digest="77d0...", files=(CheckpointFile(name="config.json", ...), ...))
    """

    iteration: int
    weights_digest: str
    """That of the iteration's manifest."""
    files: tuple[CheckpointFile, ...]

    @property
    def size(self) -> int:
        return sum(file.artifact.size for file in self.files)


class RunRef(Record):
    """Where a run lives. Enough, with the store, to find its config and everything it committed.

    Example: RunRef(run_id="quickstart-3", store_uri="file:///home/ada/roll-data", config_digest="1b4f0e98...")
    """

    run_id: str
    store_uri: str
    config_digest: str
    retry_seconds: float = 300.0
    """The config's `store.retry_seconds`, for whoever has to ask the store for the config."""
