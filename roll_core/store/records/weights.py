"""Weights versions that engines read from the store: one record each, whole or as a difference to the version before.

    runs/quickstart-3/weights/00000012-5b1e09c3f2aa.json

A version serves only engines of the running leg. It is retired when it is older than the grace period and no younger version
is a difference to it; the newest stays until the run is done. `roll_core.weights` encodes and decodes the objects.
"""

from collections.abc import Sequence
from typing import NamedTuple

from roll_core.errors import ArtifactDamaged
from roll_core.store.media.medium import ListedObject
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.store.records.listing import ITERATION_AND_DIGEST, warn_of_strays
from roll_core.store.records.sealed import create_sealed, read_record, read_records, replace_sealed
from roll_core.types.refs import WeightsRef, record_digest, record_json


class RecordedWeights(NamedTuple):
    """Weights record in the store, as it was listed and as it was read."""

    listed: ListedObject
    weights: WeightsRef

    @property
    def name(self) -> str:
        """Name of the record's object."""
        return self.listed.name

    @property
    def age_seconds(self) -> float:
        """Age of the record by the store's clock."""
        return self.listed.age_seconds


def record_weights(store: ObjectStore, weights: WeightsRef) -> None:
    """Record a stored weights version, which makes it visible. An earlier leg's record is replaced, to restart its age."""
    name, content = weights_record_name(weights), record_json(weights, indent=1)
    try:
        create_sealed(store, name, content)
    except AlreadyExists:
        replace_sealed(store, name, content)


def read_base(store: ObjectStore, weights: WeightsRef) -> WeightsRef:
    """Read the record of the version that `weights` is a difference to."""
    assert weights.base is not None, "whole weights have no base"
    try:
        return read_record(store, weights.base, WeightsRef)
    except FileNotFoundError:
        raise ArtifactDamaged(
            f"store: {weights.base}, which weights version {weights.version} is made of, is missing from {store.uri}"
        ) from None


def listed_weights(store: ObjectStore, run_id: str) -> list[ListedObject]:
    """List all weights records of a run."""
    folder = f"runs/{run_id}/weights"
    listed = list(store.list_below(folder))
    names = {stored.name: bool(ITERATION_AND_DIGEST.fullmatch(stored.name.removeprefix(f"{folder}/"))) for stored in listed}
    warn_of_strays(store.uri, folder, tuple(name for name, is_record in names.items() if not is_record))
    return [stored for stored in listed if names[stored.name]]


def recorded_weights(store: ObjectStore, run_id: str) -> list[RecordedWeights]:
    """Read all weights records of a run, youngest first."""
    found = sorted(listed_weights(store, run_id), key=lambda stored: stored.age_seconds)
    records = read_records(store, [stored.name for stored in found], WeightsRef)
    return [RecordedWeights(stored, weights) for stored, weights in zip(found, records, strict=True) if weights]


def weights_in_use(recorded: Sequence[RecordedWeights], grace_seconds: float, min_kept: int) -> list[RecordedWeights]:
    """Select the versions that engines may read, from records sorted youngest first.

    These are the versions younger than `grace_seconds`, the youngest `min_kept`, and every version they are differences to.
    """
    by_name = {each.name: each for each in recorded}
    needed: dict[str, RecordedWeights] = {}
    for number, each in enumerate(recorded):
        follow: RecordedWeights | None = each if number < min_kept or each.age_seconds < grace_seconds else None
        while follow is not None and follow.name not in needed:
            needed[follow.name] = follow
            follow = by_name.get(follow.weights.base or "")
    return list(needed.values())


def weights_record_name(weights: WeightsRef) -> str:
    """Name of a weights record, by its content: one version stored whole and stored as a difference has two records."""
    return f"runs/{weights.run_id}/weights/{weights.version:08d}-{record_digest(weights)[:12]}.json"
