"""Garbage collection: what no manifest, checkpoint or export of any run names, and no engine may read, goes if it is old.

Rollouts and files are stored before they are named, so what is young is left alone however unreachable it looks. If one
record of one run cannot be read, nobody knows what it names, and nothing is removed.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from roll_core.config.operations.services import GRACE_MINUTES
from roll_core.errors import UserError
from roll_core.store.media.medium import ListedObject, in_order
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.store.records.checkpoints import read_checkpoints
from roll_core.store.records.exports import read_exports
from roll_core.store.records.runs import read_chain, stored_config
from roll_core.store.records.weights import recorded_weights, weights_in_use

DELETES_IN_FLIGHT = 16


def find_garbage(store: ObjectStore, older_than_seconds: float) -> Iterator[ListedObject]:
    """Objects that are not needed, and records of weights that are not, as they are found."""
    needed = needed_objects(store, older_than_seconds)
    folders = ["objects", *(f"runs/{run_id}/weights" for run_id in store.list("runs"))]
    for stored in chain.from_iterable(map(store.list_below, folders)):
        if stored.name not in needed and stored.age_seconds >= older_than_seconds:
            yield stored


def remove(store: ObjectStore, garbage: Iterable[ListedObject]) -> Iterator[ListedObject]:
    """Delete objects as they are found; each once it is gone."""

    def delete(stored: ListedObject) -> ListedObject:
        store.delete(stored.name)
        return stored

    return in_order(delete, garbage, DELETES_IN_FLIGHT)


def needed_objects(store: ObjectStore, young_seconds: float) -> set[str]:
    """Names of everything that can be reached from the runs in a store, the records of weights in use among them."""
    run_ids = list(store.list("runs"))
    if not run_ids:
        raise UserError(
            f"store.uri: there is no run in {store.uri}, so nothing says what is needed there: check the address"
        )
    return {name for run_id in run_ids for name in _needed_by(store, run_id, young_seconds)}


def longest_grace_minutes(store: ObjectStore) -> float:
    """What the most patient of the runs in a store asks for: its iterations take long."""
    sections = (stored_config(store, run_id).get("store") or {} for run_id in store.list("runs"))
    return max((section.get("grace_minutes", GRACE_MINUTES) for section in sections), default=GRACE_MINUTES)


def _needed_by(store: ObjectStore, run_id: str, young_seconds: float) -> Iterator[str]:
    config = stored_config(store, run_id)  # a fork without its config would look like a run of its own
    manifests = read_chain(store, run_id)
    files = [file for export in read_exports(store, run_id) for file in export.files]
    for manifest in manifests:
        yield from map(object_name, manifest.artifacts)
    for checkpoint in read_checkpoints(store, run_id):
        files += checkpoint.files
    yield from (object_name(file.artifact) for file in files)
    is_done = bool(manifests) and manifests[-1].iteration >= config["iterations"]
    for weights in weights_in_use(recorded_weights(store, run_id), young_seconds, at_least=0 if is_done else 1):
        yield weights.name
        yield from map(object_name, weights.weights.artifacts)
