"""Records that are found by name and not by digest (configs, manifests), kept with their own name and digest.

A sealed object is JSON that a person can read:
    {"name": "runs/quickstart-3/iterations/00000004.json",
    "sha256": "5d41402a...",
    "content":
    {...}
    }
A changed byte, a cut, or an object that stands in another's place is noticed by whoever reads it. Version 0.1.0 wrote the
content alone; that is still read, and protected only by the digests others keep of it.
"""

import json
from typing import TypeVar

from pydantic import ValidationError

from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore
from roll_core.types.refs import Record, digest_of

AnyRecord = TypeVar("AnyRecord", bound=Record)

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
        if _is_content_alone(data):
            return data
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


def _is_content_alone(data: bytes) -> bool:
    """Whole JSON with no trace of a seal. A damaged seal keeps at least one of its keys, or is no JSON any more."""
    try:
        record = json.loads(data)
    except ValueError:
        return False
    return isinstance(record, dict) and not record.keys() & {"sha256", "content"}


def _seal(name: str, content: bytes) -> bytes:
    head = f'{{"name": {json.dumps(name)},\n"sha256": "{digest_of(content)}",'
    return head.encode() + _BEFORE_CONTENT + content + _AFTER_CONTENT
