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


def digest_of(data: bytes | memoryview) -> str:
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
    WEIGHTS = "weights"


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
    weights_digest: str
    """The `weights_digest` of the iteration's manifest."""
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


class StoredBucket(Record):
    """Some tensors of stored weights, as bytes one after another.

    Example: StoredBucket(number=0, size=268435456, digest="1f3a...", artifact=ArtifactRef(kind="weights", ...))
    """

    number: int
    size: int
    digest: str
    """Of its bytes, whole."""
    artifact: ArtifactRef
    """Its bytes, or how they differ from those of the version before."""


class WeightsRef(Record):
    """Numbered weights in the store, for engines to read.

    Example: WeightsRef(run_id="quickstart-3", version=12, weights_digest="77d0...", base="runs/quickstart-3/weights/...",
    layout=ArtifactRef(...), buckets=(StoredBucket(...), ...), check=ArtifactRef(...))
    """

    run_id: str
    version: int
    weights_digest: str
    """That of the manifest which commits this version."""
    base: str | None
    """The record of the version that buckets are differences to; null where they are whole."""
    layout: ArtifactRef
    """Names, kinds and shapes of the tensors in every bucket."""
    buckets: tuple[StoredBucket, ...]
    check: ArtifactRef
    """What an engine compares with when it has taken them over."""

    @property
    def artifacts(self) -> list[ArtifactRef]:
        return [self.layout, self.check, *(bucket.artifact for bucket in self.buckets)]

    @property
    def stored_bytes(self) -> int:
        return sum(bucket.artifact.size for bucket in self.buckets)


class RunRef(Record):
    """Where a run lives. Enough, with the store, to find its config and everything it committed.

    Example: RunRef(run_id="quickstart-3", store_uri="file:///home/ada/roll-data", config_digest="1b4f0e98...")
    """

    run_id: str
    store_uri: str
    config_digest: str
    retry_seconds: float = 300.0
    """The config's `store.retry_seconds`, for whoever has to ask the store for the config."""
