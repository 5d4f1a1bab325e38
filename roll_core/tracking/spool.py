"""Spool: a folder on local disk between the leg that logs and the process that uploads to MLflow.

The tracker writes it, the uploader reads it. It outlives both, so that the next leg uploads what the last one could not.
    events.jsonl       append-only, one event per line
    artifacts/         files to upload, each in its own folder, removed once uploaded
    destination.json   the MLflow run that the events belong to
    cursor.json        byte offset in events.jsonl up to which events are uploaded
    drain              request to the uploader to finish by a deadline
"""

import shutil
import threading
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from roll_core.errors import UserError
from roll_core.host import atomic_replace
from roll_core.line_log import append_line
from roll_core.types.manifest import Metrics
from roll_core.types.refs import Record


class MlflowDeleted(UserError):
    """The MLflow run or the experiment was deleted, so MLflow refuses every event."""


class RunStatus(StrEnum):
    """Final status of a run, as MLflow names it."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


class MetricsLogged(Record):
    """Event: metrics of an iteration.

    Example: MetricsLogged(iteration=4, metrics={"reward/mean": 0.41}, timestamp_ms=1794735000000)
    """

    # Plain JSON would turn NaN into null, and a loss that became NaN is the one to see.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    kind: Literal["metrics"] = "metrics"
    iteration: int
    metrics: Metrics
    timestamp_ms: int


class ArtifactLogged(Record):
    """Event: an artifact to upload. `file` is its path under `artifacts/`; `name` is its path in the MLflow run.

    Example: ArtifactLogged(name="manifests/00000004.json", file="5d41402a/00000004.json")
    """

    kind: Literal["artifact"] = "artifact"
    name: str
    file: str


class TagsSet(Record):
    """Event: tags of the MLflow run. Example: TagsSet(tags={"roll.leg": "2"})"""

    kind: Literal["tags"] = "tags"
    tags: dict[str, str]


class ParamsLogged(Record):
    """Event: params of the MLflow run. Example: ParamsLogged(params={"algorithm.kind": "grpo"})"""

    kind: Literal["params"] = "params"
    params: dict[str, str]


class RunEnded(Record):
    """Event: the run has ended. Example: RunEnded(status="FINISHED", timestamp_ms=1794735000000)"""

    kind: Literal["ended"] = "ended"
    status: RunStatus
    timestamp_ms: int


TrackingEvent = MetricsLogged | ArtifactLogged | TagsSet | ParamsLogged | RunEnded
_EVENT: TypeAdapter[TrackingEvent] = TypeAdapter(Annotated[TrackingEvent, Field(discriminator="kind")])


class Destination(Record):
    """MLflow run that the events of a spool belong to. Addresses are absolute, so that any process can upload.

    Example: Destination(tracking_uri="http://mlflow:5000", experiment="roll", run_id="quickstart-3",
    store_uri="file:///home/ada/roll-data")
    """

    tracking_uri: str
    experiment: str
    run_id: str
    store_uri: str


class _Cursor(Record):
    offset: int
    """Bytes of events.jsonl that are uploaded."""


class _Drain(Record):
    deadline: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class SpooledEvent:
    """Event, and the byte offset after its line, which becomes the cursor once the event is uploaded."""

    event: TrackingEvent
    end: int


@dataclass(frozen=True)
class Pending:
    """Events read from an offset on, in order; the number of undecodable lines; and the offset where reading stopped."""

    events: tuple[SpooledEvent, ...]
    num_damaged: int
    end: int


class Spool:
    """Files of one spool folder.

    Example: spool = Spool(Path("/tmp/roll/quickstart-3")); spool.read(spool.read_cursor(), max_events=100)
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self.events_file = self.folder / "events.jsonl"
        self.lock_file = self.folder / "lock"
        self.log_file = self.folder / "uploader.log"
        self._artifacts = self.folder / "artifacts"
        self._destination_file = self.folder / "destination.json"
        self._cursor_file = self.folder / "cursor.json"
        self._drain_file = self.folder / "drain"

    def write_destination(self, destination: Destination) -> None:
        _replace(self._destination_file, destination)

    def read_destination(self) -> Destination:
        return Destination.model_validate_json(self._destination_file.read_bytes())

    def write_cursor(self, offset: int) -> None:
        _replace(self._cursor_file, _Cursor(offset=offset))

    def read_cursor(self) -> int:
        """Return the byte offset to resume from; 0 if the cursor is lost or beyond the file: uploading twice is harmless."""
        try:
            offset = _Cursor.model_validate_json(self._cursor_file.read_bytes()).offset
        except (FileNotFoundError, ValidationError):
            return 0
        return offset if offset <= self._size() else 0

    def request_drain(self, deadline: float) -> None:
        """Ask the uploader to finish and exit by `deadline`, in seconds since the epoch."""
        _replace(self._drain_file, _Drain(deadline=deadline))

    def drain_deadline(self) -> float | None:
        """Time by which the uploader must have uploaded the rest of the spool and exit, in seconds since the epoch; None
        before it was asked to."""
        try:
            return _Drain.model_validate_json(self._drain_file.read_bytes()).deadline
        except (FileNotFoundError, ValidationError):
            return None

    def clear_drain(self) -> None:
        """Withdraw the drain request of an earlier leg."""
        self._drain_file.unlink(missing_ok=True)

    def put_artifact(self, name: str, data: bytes) -> str:
        """Write an artifact's bytes to the spool; returns the `file` of its event.

        MLflow names an artifact after its local file, so a unique folder around the file makes the path unique.
        """
        file = f"{uuid.uuid4().hex}/{PurePosixPath(name).name}"
        path = self.artifact_path(file)
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        return file

    def artifact_path(self, file: str) -> Path:
        return self._artifacts / file

    def remove_artifact(self, file: str) -> None:
        shutil.rmtree(self.artifact_path(file).parent, ignore_errors=True)

    def read(self, offset: int, max_events: int) -> Pending:
        """Read the next events from `offset` on. A last line without a newline is still being written and is not read."""
        if self._size() <= offset:
            return Pending(events=(), num_damaged=0, end=offset)
        events: list[SpooledEvent] = []
        num_damaged = 0
        with self.events_file.open("rb") as lines:
            lines.seek(offset)
            for line in lines:
                if not line.endswith(b"\n") or len(events) == max_events:
                    break
                offset += len(line)
                try:
                    events.append(SpooledEvent(_EVENT.validate_json(line), offset))
                except ValidationError:
                    num_damaged += 1
        return Pending(tuple(events), num_damaged, offset)

    def count_left(self) -> int:
        """Number of events after the cursor: those not uploaded yet."""
        offset, left = self.read_cursor(), 0
        while (pending := self.read(offset, max_events=1000)).end > offset:
            offset, left = pending.end, left + len(pending.events)
        return left

    def _size(self) -> int:
        try:
            return self.events_file.stat().st_size
        except FileNotFoundError:
            return 0


class SpoolWriter:
    """Writer that appends events to a spool, from any thread. A killed process or a full disk tears one line at most.

    Nothing is synced: the page cache survives the process, and a sync could delay training.
    """

    def __init__(self, spool: Spool):
        self._spool = spool
        self._lock = threading.Lock()

    def append(self, event: TrackingEvent) -> None:
        """Append an event as one line. Raises OSError if the line cannot be written whole."""
        with self._lock:
            self._spool.folder.mkdir(parents=True, exist_ok=True)
            append_line(self._spool.events_file, event.model_dump_json().encode())


def _replace(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as file:
        file.write(record.model_dump_json().encode())
