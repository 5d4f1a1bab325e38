"""Records that are found by name and not by digest (configs, manifests), kept with their own name and digest.

A sealed object is JSON that a person can read:
    {"name": "runs/quickstart-3/iterations/00000004.json",
    "sha256": "5d41402a...",
    "content":
    {...}
    }
A changed byte, a cut, or an object that stands in another's place is noticed by whoever reads it.
"""

import json
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from pydantic import ValidationError

from roll_core.errors import ArtifactDamaged
from roll_core.store.media.medium import in_order
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.types.refs import Record, digest_of, record_json

AnyRecord = TypeVar("AnyRecord", bound=Record)

RECORDS_IN_FLIGHT = 16
"""Records read at once: reading 1,000 one after another from a store with 20 ms latency would take 20 s."""

_BEFORE_CONTENT, _AFTER_CONTENT = b'\n"content":\n', b"\n}\n"


def create_sealed(store: ObjectStore, name: str, content: bytes) -> None:
    """Write a record that must not exist yet, as `ObjectStore.create` does."""
    store.create(name, _seal(name, content))


def read_sealed(store: ObjectStore, name: str) -> bytes:
    """The content of a record as it was written; FileNotFoundError if it is not there."""
    data = store.read(name)
    _, _, rest = data.partition(_BEFORE_CONTENT)
    content = rest.removesuffix(_AFTER_CONTENT)
    if data != _seal(name, content):
        raise ArtifactDamaged(
            f"store: {name} in {store.uri} is not what was written under that name (damaged or edited): "
            "restore it from a copy"
        )
    return content


def read_record(store: ObjectStore, name: str, record: type[AnyRecord]) -> AnyRecord:
    """A sealed record; FileNotFoundError if it is not there."""
    try:
        return record.model_validate_json(read_sealed(store, name))
    except ValidationError as error:
        raise ArtifactDamaged(
            f"store: {name} in {store.uri} was written by a version of roll with other records "
            f"({error.error_count()} fields differ): read it with that version"
        ) from None


def create_record(store: ObjectStore, name: str, record: Record) -> None:
    """Create a sealed record. A record that an earlier leg created under this name stands."""
    try:
        create_sealed(store, name, record_json(record, indent=1))
    except AlreadyExists:
        return


def read_records(store: ObjectStore, names: Iterable[str], record: type[AnyRecord]) -> list[AnyRecord | None]:
    """Read sealed records in order, several at a time; None for one that was deleted since it was listed."""
    return list(in_order(partial(_read_if_present, store, record), names, RECORDS_IN_FLIGHT))


def _read_if_present(store: ObjectStore, record: type[AnyRecord], name: str) -> AnyRecord | None:
    try:
        return read_record(store, name, record)
    except FileNotFoundError:
        return None


def _seal(name: str, content: bytes) -> bytes:
    head = f'{{"name": {json.dumps(name)},\n"sha256": "{digest_of(content)}",'
    return head.encode() + _BEFORE_CONTENT + content + _AFTER_CONTENT
