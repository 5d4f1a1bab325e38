"""Garbage collection: remove old objects that no manifest or record of any run reaches. Used by `roll gc`.

Rollouts and files are stored before a manifest or record names them. Young objects are therefore kept even if nothing
reaches them. If one record of one run cannot be read, the objects it names are unknown, and nothing is removed.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from roll_core.config.operations.services import GRACE_MINUTES
from roll_core.errors import UserError
from roll_core.store.media.medium import ListedObject, map_in_order
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.store.records.checkpoints import read_checkpoints
from roll_core.store.records.exports import read_exports
from roll_core.store.records.listing import ARTIFACT, warn_of_strays
from roll_core.store.records.runs import list_runs, read_chain
from roll_core.store.records.stored_config import read_stored_config
from roll_core.store.records.weights import listed_weights, recorded_weights, weights_in_use

DELETES_IN_FLIGHT = 16
"""Objects deleted at once."""


def find_garbage(store: ObjectStore, older_than_seconds: float) -> Iterator[ListedObject]:
    """Yield unreachable objects and weights records that are at least `older_than_seconds` old, as they are found."""
    reachable = reachable_objects(store, older_than_seconds)
    for stored in chain(_artifacts(store), *(listed_weights(store, run_id) for run_id in list_runs(store))):
        if stored.name not in reachable and stored.age_seconds >= older_than_seconds:
            yield stored


def remove(store: ObjectStore, garbage: Iterable[ListedObject]) -> Iterator[ListedObject]:
    """Delete garbage, several objects at once, and yield each object after it is deleted.

    An object that was written again since it was listed is not garbage any more: a live leg is about to name it.
    """

    def delete(stored: ListedObject) -> ListedObject | None:
        return stored if store.delete_unmodified(stored) else None

    return (deleted for deleted in map_in_order(delete, garbage, DELETES_IN_FLIGHT) if deleted is not None)


def _artifacts(store: ObjectStore) -> Iterator[ListedObject]:
    """Yield all artifacts, old and young. Other files below objects/ are not roll's, and are left alone."""
    for stored in store.list_below("objects"):
        if ARTIFACT.fullmatch(stored.name):
            yield stored
        else:
            warn_of_strays(store.uri, "objects", (stored.name,))


def reachable_objects(store: ObjectStore, grace_seconds: float) -> set[str]:
    """Names of all objects that the runs in a store reach, and of the weights records in use.

    Weights versions younger than `grace_seconds` count as in use.
    """
    run_ids = [run_id for run_id in list_runs(store) if read_stored_config(store, run_id) is not None]
    if not run_ids:
        raise UserError(
            f"store.uri: there is no run in {store.uri}, so nothing says what is needed there: check the address"
        )
    return {name for run_id in run_ids for name in _reachable_from(store, run_id, grace_seconds)}


def longest_grace_minutes(store: ObjectStore) -> float:
    """Longest `store.grace_minutes` of the runs in a store: objects of the run with the slowest iterations need it."""
    configs = (read_stored_config(store, run_id) for run_id in list_runs(store))
    return max((config.store.grace_minutes for config in configs if config is not None), default=GRACE_MINUTES)


def _reachable_from(store: ObjectStore, run_id: str, grace_seconds: float) -> Iterator[str]:
    """Yield the names of objects that one run reaches, and of its weights records in use."""
    config = read_stored_config(store, run_id)
    manifests = read_chain(store, run_id)
    files = [file for export in read_exports(store, run_id) for file in export.files]
    for manifest in manifests:
        yield from map(object_name, manifest.artifacts)
    for checkpoint in read_checkpoints(store, run_id):
        files += checkpoint.files
    yield from (object_name(file.artifact) for file in files)
    is_done = config is not None and bool(manifests) and manifests[-1].iteration >= config.iterations
    for weights in weights_in_use(recorded_weights(store, run_id), grace_seconds, min_kept=0 if is_done else 1):
        yield weights.name
        yield from map(object_name, weights.weights.artifacts)
