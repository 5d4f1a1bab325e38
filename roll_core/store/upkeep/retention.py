"""Retention: which checkpoints stay, and how the others go without taking what somebody needs.

A checkpoint that a policy lets go is marked first (runs/RUN/retiring/). A run that is going to fork from it or to learn from
it stores its config and then looks for the mark; whoever retires it marks it and then looks into all configs. So either the
mark is seen and the new run is refused with a sentence, or the config is seen and the checkpoint stays.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from roll_core.config.operations.services import CheckpointConfig
from roll_core.store.media.medium import in_order
from roll_core.store.object_store import AlreadyExists, ObjectStore, object_name
from roll_core.store.records.checkpoints import checkpoint_record_name, checkpoints_of, mark_name, read_checkpoints
from roll_core.store.records.exports import read_exports
from roll_core.store.records.runs import MANIFESTS_IN_FLIGHT, read_chain, stored_config
from roll_core.store.records.weights import recorded_weights, weights_in_use
from roll_core.types.manifest import Manifest
from roll_core.types.refs import CheckpointFile, CheckpointRef


class Place(NamedTuple):
    """Where a run was. Example: Place("quickstart-3", 20)"""

    run_id: str
    iteration: int


def retired(
    checkpoints: Sequence[CheckpointRef], chain: Sequence[Manifest], policy: CheckpointConfig, needed: Collection[int]
) -> list[CheckpointRef]:
    """Which of a chain's checkpoints, given by iteration, a policy lets go: never the first, the newest, or one needed."""
    if policy.keep_last is None or not checkpoints:
        return []
    iterations = [checkpoint.iteration for checkpoint in checkpoints]
    accuracies = {manifest.iteration: manifest.evaluated.accuracy for manifest in chain if manifest.evaluated is not None}
    evaluated = [iteration for iteration in iterations if iteration in accuracies]
    best = sorted(evaluated, key=lambda iteration: (accuracies[iteration], iteration), reverse=True)[: policy.keep_best]
    every = [iteration for iteration in iterations if policy.keep_every and iteration % policy.keep_every == 0]
    kept = {iterations[0], *iterations[-policy.keep_last :], *best, *every, *needed}
    return [checkpoint for checkpoint in checkpoints if checkpoint.iteration not in kept]


def retire(store: ObjectStore, run_id: str, policy: CheckpointConfig, grace_seconds: float) -> list[CheckpointRef]:
    """Remove the checkpoints of a run that its policy lets go and that are older than the grace, with the files nothing else
    names; which they were. What a killed one left half done, the next one does, or `roll gc`."""
    going = _going(store, run_id, policy, grace_seconds)
    marks = {mark_name(run_id, checkpoint) for checkpoint in going}
    for left in store.list(f"runs/{run_id}/retiring"):
        if f"runs/{run_id}/retiring/{left}" not in marks:
            store.delete(f"runs/{run_id}/retiring/{left}")
    if not going:
        return []
    for mark in sorted(marks):
        _mark(store, mark)
    needed = needed_places(store)
    gone = [checkpoint for checkpoint in going if Place(run_id, checkpoint.iteration) not in needed]
    for checkpoint in gone:
        store.delete(checkpoint_record_name(run_id, checkpoint))
    needed_files = {object_name(file.artifact) for file in _all_files(store)}
    free(store, {object_name(f.artifact) for checkpoint in gone for f in checkpoint.files} - needed_files, grace_seconds)
    for mark in sorted(marks):
        store.delete(mark)
    return gone


def needed_places(store: ObjectStore) -> set[Place]:
    """Checkpoints that configs of runs in a store name: where forks left, and who teaches. Each by the run that made it."""
    run_ids = list(store.list("runs"))
    configs = dict(zip(run_ids, in_order(partial(stored_config, store), run_ids, MANIFESTS_IN_FLIGHT), strict=True))
    return {_where_made(configs, place) for config in configs.values() for place in _named(config)}


def _going(store: ObjectStore, run_id: str, policy: CheckpointConfig, grace_seconds: float) -> list[CheckpointRef]:
    chain = read_chain(store, run_id)
    ages = {stored.name: stored.age_seconds for stored in store.list_below(f"runs/{run_id}/checkpoints")}
    needed = {place.iteration for place in needed_places(store) if place.run_id == run_id}
    going = retired(checkpoints_of(store, chain), chain, policy, needed) + _strays(store, run_id, chain)
    # An ancestor's checkpoints have no record here.
    return [each for each in going if ages.get(checkpoint_record_name(run_id, each), -1.0) >= grace_seconds]


def _strays(store: ObjectStore, run_id: str, chain: Sequence[Manifest]) -> list[CheckpointRef]:
    """What legs recorded that lost their iteration to another leg: nobody will ever load them."""
    committed = {manifest.iteration: manifest.weights_digest for manifest in chain}
    records = read_checkpoints(store, run_id)
    return [each for each in records if committed.get(each.iteration, each.weights_digest) != each.weights_digest]


def free(store: ObjectStore, unneeded: Collection[str], grace_seconds: float) -> None:
    """Delete objects that nothing names any more, but for young ones, since somebody who has not named them yet may have put
    the same bytes. A folder's ages are read just before."""
    for folder in sorted({name.rpartition("/")[0] for name in unneeded}):
        for stored in store.list_below(folder):
            if stored.name in unneeded and stored.age_seconds >= grace_seconds:
                store.delete(stored.name)


def _all_files(store: ObjectStore) -> Iterator[CheckpointFile]:
    """Of every checkpoint and export of every run. Rollouts are never the same bytes."""
    for run_id in store.list("runs"):
        for checkpoint in read_checkpoints(store, run_id):
            yield from checkpoint.files
        for export in read_exports(store, run_id):
            yield from export.files


def retire_weights(store: ObjectStore, run_id: str, grace_seconds: float) -> list[str]:
    """Remove versions that no engine needs any more, with the objects no other weights are made of; which they were."""
    recorded = recorded_weights(store, run_id)
    staying = {each.name for each in weights_in_use(recorded, grace_seconds, at_least=1)}
    going = [each for each in recorded if each.name not in staying]
    for each in going:  # the youngest first: none is left without its base
        store.delete(each.name)
    # The bytes of weights are nobody's but other weights': a fork's first are its parent's.
    named = {
        object_name(artifact)
        for other in store.list("runs")
        for each in recorded_weights(store, other)
        for artifact in each.weights.artifacts
    }
    free(store, {object_name(artifact) for each in going for artifact in each.weights.artifacts} - named, grace_seconds)
    return [each.name for each in going]


def _mark(store: ObjectStore, name: str) -> None:
    try:
        store.create(name, b"")
    except AlreadyExists:  # by one that was killed
        return


def _named(config: dict[str, Any]) -> list[Place]:
    origin, algorithm = config.get("forked_from"), config.get("algorithm") or {}
    teachers = [teacher for teacher in algorithm.get("teachers") or [] if teacher["kind"] == "run"]
    return [Place(named["run_id"], named["iteration"]) for named in [*([origin] if origin else []), *teachers]]


def _where_made(configs: dict[str, dict[str, Any]], place: Place) -> Place:
    """A fork's early iterations are its parent's."""
    while (origin := configs.get(place.run_id, {}).get("forked_from")) and place.iteration <= origin["iteration"]:
        place = Place(origin["run_id"], place.iteration)
    return place
