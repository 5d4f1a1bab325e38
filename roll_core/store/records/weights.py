"""Weights that engines read from the store: a record a version, whole or as differences to the one before.

    runs/quickstart-3/weights/00000012-5b1e09c3f2aa.json

They are there for engines that live now. A version goes when it is older than the grace and no younger one is made of it;
the newest stays until the run is done. What is in the objects is the business of `roll_core.weights`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.store.records.sealed import create_sealed, read_record, read_records
from roll_core.types.refs import WeightsRef, record_digest, record_json


class RecordedWeights(NamedTuple):
    """A record as it lies in the store, with its age by the store's clock."""

    name: str
    age_seconds: float
    weights: WeightsRef


def record_weights(store: ObjectStore, weights: WeightsRef) -> None:
    """Make stored buckets be a version. One that an earlier leg has recorded is recorded again, to be young."""
    name, content = weights_record_name(weights), record_json(weights, indent=1)
    try:
        create_sealed(store, name, content)
    except AlreadyExists:
        store.delete(name)
        create_sealed(store, name, content)


def read_base(store: ObjectStore, weights: WeightsRef) -> WeightsRef:
    """The version that these are differences to."""
    assert weights.base is not None, "whole weights have no base"
    try:
        return read_record(store, weights.base, WeightsRef)
    except FileNotFoundError:
        raise ArtifactDamaged(
            f"store: {weights.base}, which weights version {weights.version} is made of, is missing from {store.uri}"
        ) from None


def recorded_weights(store: ObjectStore, run_id: str) -> list[RecordedWeights]:
    """Every version a run's legs recorded and that was not retired, the youngest first."""
    found = sorted(store.list_below(f"runs/{run_id}/weights"), key=lambda stored: stored.age_seconds)
    records = read_records(store, [stored.name for stored in found], WeightsRef)
    return [RecordedWeights(s.name, s.age_seconds, weights) for s, weights in zip(found, records, strict=True) if weights]


def weights_in_use(recorded: Sequence[RecordedWeights], young_seconds: float, at_least: int) -> list[RecordedWeights]:
    """Those that engines may read: all that are young, at least so many of the youngest, and what they are made of."""
    by_name = {each.name: each for each in recorded}
    needed: dict[str, RecordedWeights] = {}
    for number, each in enumerate(recorded):
        follow: RecordedWeights | None = each if number < at_least or each.age_seconds < young_seconds else None
        while follow is not None and follow.name not in needed:
            needed[follow.name] = follow
            follow = by_name.get(follow.weights.base or "")
    return list(needed.values())


def weights_record_name(weights: WeightsRef) -> str:
    """By what is in it, so that the same version stored whole and as a difference are two."""
    return f"runs/{weights.run_id}/weights/{weights.version:08d}-{record_digest(weights)[:12]}.json"
