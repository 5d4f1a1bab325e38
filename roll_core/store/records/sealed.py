"""Sealed records: JSON found by name (configs, manifests, records), stored together with its own name and digest.

Example of a sealed object:
    {"name": "runs/quickstart-3/iterations/00000004.json",
    "sha256": "5d41402a...",
    "content":
    {...}
    }
Every read verifies the name and the digest, so a changed byte, a truncation or a swapped object raises ArtifactDamaged.
"""

import json
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from pydantic import ValidationError

from roll_core.errors import ArtifactDamaged
from roll_core.store.media.medium import map_in_order
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.types.refs import Record, digest_of, record_json

AnyRecord = TypeVar("AnyRecord", bound=Record)

RECORDS_IN_FLIGHT = 16
"""Records read at once. One after another, 1,000 of them would take 20 s from a store with 20 ms latency."""

_BEFORE_CONTENT, _AFTER_CONTENT = b'\n"content":\n', b"\n}\n"


def create_sealed(store: ObjectStore, name: str, content: bytes) -> None:
    """Seal and create a record that must not exist yet; raises AlreadyExists if it does."""
    store.create(name, _seal(name, content))


def replace_sealed(store: ObjectStore, name: str, content: bytes) -> None:
    """Seal and write a record, in the place of an earlier one if there is one."""
    store.replace(name, _seal(name, content))


def read_sealed(store: ObjectStore, name: str) -> bytes:
    """Read and verify a sealed record; returns its content as written. Raises FileNotFoundError if it does not exist."""
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
    """Read and parse a sealed record. Raises FileNotFoundError if it does not exist."""
    try:
        return record.model_validate_json(read_sealed(store, name))
    except ValidationError as error:
        raise ArtifactDamaged(
            f"store: {name} in {store.uri} was written by a version of roll with other records "
            f"({error.error_count()} fields differ): read it with that version"
        ) from None


def create_record(store: ObjectStore, name: str, record: Record) -> None:
    """Create a sealed record. If an earlier leg has created one of that name, it stays."""
    try:
        create_sealed(store, name, record_json(record, indent=1))
    except AlreadyExists:
        return


def read_records(store: ObjectStore, names: Iterable[str], record: type[AnyRecord]) -> list[AnyRecord | None]:
    """Read sealed records in order, several at once; None for a record that was deleted since it was listed."""
    return list(map_in_order(partial(_read_if_present, store, record), names, RECORDS_IN_FLIGHT))


def _read_if_present(store: ObjectStore, record: type[AnyRecord], name: str) -> AnyRecord | None:
    try:
        return read_record(store, name, record)
    except FileNotFoundError:
        return None


def _seal(name: str, content: bytes) -> bytes:
    """Wrap JSON content into a sealed object."""
    head = f'{{"name": {json.dumps(name)},\n"sha256": "{digest_of(content)}",'
    return head.encode() + _BEFORE_CONTENT + content + _AFTER_CONTENT
