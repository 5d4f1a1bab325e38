"""Garbage collection: what no manifest, checkpoint or export of any run names, and is old, goes.

Rollouts and files are stored before they are named, so what is young is left alone however unreachable it looks. If one
record of one run cannot be read, nobody knows what it names, and nothing is removed.
"""

from collections.abc import Iterable, Iterator

from roll_core.config.services import GRACE_MINUTES
from roll_core.errors import UserError
from roll_core.store.checkpoints import read_records
from roll_core.store.exports import read_exports
from roll_core.store.medium import Stored, in_order
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.store.runs import read_chain, stored_config
from roll_core.types.refs import ArtifactRef

DELETES_IN_FLIGHT = 16


def find_garbage(store: ObjectStore, older_than_seconds: float) -> Iterator[Stored]:
    """Objects that are not needed, as they are found."""
    needed = needed_objects(store)
    for stored in store.list_below("objects"):
        if stored.name not in needed and stored.age_seconds >= older_than_seconds:
            yield stored


def remove(store: ObjectStore, garbage: Iterable[Stored]) -> Iterator[Stored]:
    """Delete objects as they are found; each once it is gone."""

    def delete(stored: Stored) -> Stored:
        store.delete(stored.name)
        return stored

    return in_order(delete, garbage, DELETES_IN_FLIGHT)


def needed_objects(store: ObjectStore) -> set[str]:
    """Names of everything that can be reached from the runs in a store."""
    run_ids = list(store.list("runs"))
    if not run_ids:
        raise UserError(
            f"store.uri: there is no run in {store.uri}, so nothing says what is needed there: check the address"
        )
    return {object_name(artifact) for run_id in run_ids for artifact in _artifacts_of(store, run_id)}


def longest_grace_minutes(store: ObjectStore) -> float:
    """What the most patient of the runs in a store asks for: its iterations take long."""
    sections = (stored_config(store, run_id).get("store") or {} for run_id in store.list("runs"))
    return max((section.get("grace_minutes", GRACE_MINUTES) for section in sections), default=GRACE_MINUTES)


def _artifacts_of(store: ObjectStore, run_id: str) -> Iterator[ArtifactRef]:
    stored_config(store, run_id)  # a fork without its config would look like a run of its own
    for manifest in read_chain(store, run_id):
        yield from manifest.artifacts
        if manifest.checkpoint is not None:
            yield from (file.artifact for file in manifest.checkpoint.files)
    for checkpoint in read_records(store, run_id):
        yield from (file.artifact for file in checkpoint.files)
    for export in read_exports(store, run_id):
        yield from (file.artifact for file in export.files)
