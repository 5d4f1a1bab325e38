"""References to objects in the store. Large objects are content-addressed: their name is the digest of their bytes.

Receipts and manifests consist of these references. A reference holds no bytes itself.
"""

import hashlib
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from roll_core.types.names import RelativeName, RunId


class Record(BaseModel):
    """Base class of all records that are stored or sent between processes: frozen, and without unknown fields."""

    # A metric may be NaN or infinite. As JSON null it could not be read back, and the run could not be resumed.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


def digest_of(data: bytes | memoryview) -> str:
    """SHA-256 digest in hexadecimal, which is also the name of an artifact with these bytes."""
    return hashlib.sha256(data).hexdigest()


def record_json(record: Record, indent: int | None = None) -> bytes:
    """Serialize a record to the JSON that is stored. Fields that were not set are left out.

    A record written by an earlier version, which lacked some fields, therefore keeps its digest when it is read today.
    """
    return record.model_dump_json(exclude_unset=True, indent=indent).encode()


def record_digest(record: Record) -> str:
    """Digest of a record's stored JSON, for example to name a parent manifest."""
    return digest_of(record_json(record))


class ArtifactKind(StrEnum):
    """Kind of content of an artifact."""

    TRAJECTORIES = "trajectories"
    TRACE = "trace"
    CHECKPOINT_FILE = "checkpoint-file"
    EXPORT_FILE = "export-file"
    WEIGHTS = "weights"


class ArtifactRef(Record):
    """Reference to an immutable object in the store.

    Example: ArtifactRef(kind="trajectories", digest="9f86d081...", size=18433)
    """

    kind: ArtifactKind
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    size: int
    """Size in bytes."""


class CheckpointFile(Record):
    """One file of a checkpoint or an export, with its name in the folder.

    Example: CheckpointFile(name="__0_0.distcp", artifact=ArtifactRef(...))
    """

    name: RelativeName
    artifact: ArtifactRef


class CheckpointRef(Record):
    """Reference to a checkpoint: weights and optimizer state after an iteration, as torch.distributed.checkpoint files.

    Example: CheckpointRef(iteration=10, weights_version=10, weights_digest="77d0...", files=(CheckpointFile(...), ...))
    """

    iteration: int
    weights_version: int
    weights_digest: str
    """The `weights_digest` of the iteration's manifest."""
    files: tuple[CheckpointFile, ...]

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.artifact.size for file in self.files)


class ExportRef(Record):
    """Reference to an export: the policy after an iteration as a Hugging Face folder (safetensors, config, tokenizer).

    Example: ExportRef(iteration=40, weights_digest="77d0...", files=(CheckpointFile(name="config.json", ...), ...))
    """

    iteration: int
    weights_digest: str
    """The `weights_digest` of the iteration's manifest."""
    files: tuple[CheckpointFile, ...]

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.artifact.size for file in self.files)


class StoredBucket(Record):
    """Bucket of stored weights: the bytes of some tensors, concatenated.

    Example: StoredBucket(number=0, size=268435456, digest="1f3a...", artifact=ArtifactRef(kind="weights", ...))
    """

    number: int
    """Index of the bucket within the weights version."""
    size: int
    """Size of the full bytes."""
    digest: str
    """Digest of the bucket's full bytes."""
    artifact: ArtifactRef
    """Stored object: the full bytes, or their difference to the bucket of the base version."""


class WeightsRef(Record):
    """Reference to one weights version in the store, from which engines read it (transport `store`).

    Example: WeightsRef(run_id="quickstart-3", version=12, weights_digest="77d0...", base="runs/quickstart-3/weights/...",
    layout=ArtifactRef(...), buckets=(StoredBucket(...), ...), check=ArtifactRef(...))
    """

    run_id: str
    version: int
    weights_digest: str
    """The `weights_digest` of the manifest that commits this version."""
    base: str | None
    """Name of the record of the base version, to which the buckets are differences; null if they hold full bytes."""
    layout: ArtifactRef
    """Names, dtypes and shapes of the tensors in every bucket."""
    buckets: tuple[StoredBucket, ...]
    check: ArtifactRef
    """Names of all tensors and samples of their values. An engine compares them with the weights it has loaded."""

    @property
    def artifacts(self) -> list[ArtifactRef]:
        """Artifacts that this version consists of."""
        return [self.layout, self.check, *(bucket.artifact for bucket in self.buckets)]

    @property
    def stored_bytes(self) -> int:
        """Size of all buckets in the store, in bytes."""
        return sum(bucket.artifact.size for bucket in self.buckets)


class RunRef(Record):
    """Reference to a run. It suffices to find the run's config and everything it committed.

    Example: RunRef(run_id="quickstart-3", store_uri="file:///home/ada/roll-data", config_digest="1b4f0e98...")
    """

    run_id: RunId
    store_uri: str
    config_digest: str
    retry_seconds: float = 300.0
    """The config's `store.retry_seconds`. It is kept here for the first read, that of the config itself."""
