"""Retention: which checkpoints and weights versions are kept, and how the others are deleted without a race.

Retiring a checkpoint first writes a tombstone (runs/RUN/retiring/), then reads the configs of all runs, then deletes the
checkpoint if no config names it. A new run that forks or distills from a checkpoint first stores its config, then looks for
the tombstone. Either the new run sees the tombstone and is refused, or the retiring process sees the config and keeps the
checkpoint. Used by the leg driver (`roles/fleet.py`, `roles/publishing.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from roll_core.config.operations.services import CheckpointConfig
from roll_core.store.media.medium import map_in_order
from roll_core.store.object_store import AlreadyExists, ObjectStore, object_name
from roll_core.store.records.checkpoints import (
    checkpoint_record_name,
    checkpointed_manifests,
    checkpoints_of,
    damage_marker_name,
    read_checkpoints,
    tombstone_name,
    without_damaged,
)
from roll_core.store.records.exports import read_exports
from roll_core.store.records.listing import ITERATION_AND_DIGEST, list_matching
from roll_core.store.records.runs import MANIFESTS_IN_FLIGHT, list_runs
from roll_core.store.records.stored_config import StoredConfig, read_stored_config
from roll_core.store.records.weights import recorded_weights, weights_in_use
from roll_core.types.manifest import Manifest
from roll_core.types.refs import CheckpointFile, CheckpointRef


class CheckpointKey(NamedTuple):
    """Run and iteration that identify a checkpoint. Example: CheckpointKey("quickstart-3", 20)"""

    run_id: str
    iteration: int


def checkpoints_to_retire(
    checkpoints: Sequence[CheckpointRef], chain: Sequence[Manifest], policy: CheckpointConfig, referenced: Collection[int]
) -> list[CheckpointRef]:
    """Return the checkpoints of a chain that the policy drops: never the first, the newest, or a referenced one.

    `checkpoints` are sorted by iteration; `referenced` holds iterations.
    """
    if policy.keep_last is None or not checkpoints:
        return []
    iterations = [checkpoint.iteration for checkpoint in checkpoints]
    accuracies = {manifest.iteration: manifest.evaluated.accuracy for manifest in chain if manifest.evaluated is not None}
    evaluated = [iteration for iteration in iterations if iteration in accuracies]
    best = sorted(evaluated, key=lambda iteration: (accuracies[iteration], iteration), reverse=True)[: policy.keep_best]
    every = [iteration for iteration in iterations if policy.keep_every and iteration % policy.keep_every == 0]
    kept = {iterations[0], *iterations[-policy.keep_last :], *best, *every, *referenced}
    return [checkpoint for checkpoint in checkpoints if checkpoint.iteration not in kept]


def retire(store: ObjectStore, run_id: str, policy: CheckpointConfig, grace_seconds: float) -> list[CheckpointRef]:
    """Delete the checkpoints of a run that its policy drops and that are older than the grace period; returns them.

    Files that no other record names are deleted with them. If a call is killed halfway, the next call or `roll gc` finishes.
    """
    retirable = _retirable(store, run_id, policy, grace_seconds)
    tombstones = {tombstone_name(run_id, checkpoint) for checkpoint in retirable}
    for left in list_matching(store, f"runs/{run_id}/retiring", ITERATION_AND_DIGEST):
        if f"runs/{run_id}/retiring/{left}" not in tombstones:
            store.delete(f"runs/{run_id}/retiring/{left}")
    if not retirable:
        return []
    for tombstone in sorted(tombstones):
        _create_tombstone(store, tombstone)
    referenced = referenced_checkpoints(store)
    retired = [checkpoint for checkpoint in retirable if CheckpointKey(run_id, checkpoint.iteration) not in referenced]
    for checkpoint in retired:
        store.delete(checkpoint_record_name(run_id, checkpoint))
        store.delete(damage_marker_name(run_id, checkpoint))
    referenced_files = {object_name(file.artifact) for file in _all_files(store)}
    delete_unreferenced(
        store,
        {object_name(f.artifact) for checkpoint in retired for f in checkpoint.files} - referenced_files,
        grace_seconds,
    )
    for tombstone in sorted(tombstones):
        store.delete(tombstone)
    return retired


def referenced_checkpoints(store: ObjectStore) -> set[CheckpointKey]:
    """Checkpoints that the configs in a store name, as origin of a fork or as teacher. Each key has the run that made it."""
    run_ids = list_runs(store)
    read = map_in_order(partial(read_stored_config, store), run_ids, MANIFESTS_IN_FLIGHT)
    configs = {run_id: config for run_id, config in zip(run_ids, read, strict=True) if config is not None}
    named = (CheckpointKey(*key) for config in configs.values() for key in config.named_checkpoints)
    return {_origin_of(configs, key) for key in named}


def _retirable(store: ObjectStore, run_id: str, policy: CheckpointConfig, grace_seconds: float) -> list[CheckpointRef]:
    """Checkpoints recorded by this run that are dropped or orphaned, and at least `grace_seconds` old."""
    chain = checkpointed_manifests(store, run_id)
    ages = {stored.name: stored.age_seconds for stored in store.list_below(f"runs/{run_id}/checkpoints")}
    referenced = {key.iteration for key in referenced_checkpoints(store) if key.run_id == run_id}
    checkpoints = checkpoints_of(store, chain)
    undamaged = without_damaged(store, run_id, checkpoints)
    # A damaged checkpoint does not count among the newest that are kept, and is retired itself unless something names it.
    damaged = [each for each in checkpoints if each not in undamaged and each.iteration not in {0, *referenced}]
    retirable = checkpoints_to_retire(undamaged, chain, policy, referenced) + damaged
    retirable += _orphaned_checkpoints(store, run_id, chain)
    # Checkpoints of an ancestor have no record under this run, hence no age.
    return [each for each in retirable if ages.get(checkpoint_record_name(run_id, each), -1.0) >= grace_seconds]


def _orphaned_checkpoints(store: ObjectStore, run_id: str, chain: Sequence[Manifest]) -> list[CheckpointRef]:
    """Checkpoints of legs that lost the race to commit their iteration: no resume ever loads them."""
    committed = {manifest.iteration: manifest.weights_digest for manifest in chain}
    records = read_checkpoints(store, run_id)
    return [each for each in records if committed.get(each.iteration, each.weights_digest) != each.weights_digest]


def delete_unreferenced(store: ObjectStore, names: Collection[str], grace_seconds: float) -> None:
    """Delete the named objects that are at least `grace_seconds` old.

    Younger ones are kept, because another process may have put the same bytes and not recorded them yet. So is one that is
    put again after it was listed.
    """
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        for stored in store.list_below(folder):
            if stored.name in names and stored.age_seconds >= grace_seconds:
                store.delete_unmodified(stored)


def _all_files(store: ObjectStore) -> Iterator[CheckpointFile]:
    """Yield the files of every checkpoint and export of every run. Rollouts never have the same bytes as these files."""
    for run_id in list_runs(store):
        for checkpoint in read_checkpoints(store, run_id):
            yield from checkpoint.files
        for export in read_exports(store, run_id):
            yield from export.files


def retire_weights(store: ObjectStore, run_id: str, grace_seconds: float) -> list[str]:
    """Delete the records of weights versions that no engine may read; returns their names.

    Objects that no other version shares are deleted with them.
    """
    recorded = recorded_weights(store, run_id)
    kept = {each.name for each in weights_in_use(recorded, grace_seconds, min_kept=1)}
    retirable = [each for each in recorded if each.name not in kept]
    for each in retirable:  # youngest first, so that no version is left without its base
        store.delete_unmodified(each.listed)
    # Only other weights records can share these objects: the first weights of a fork are its parent's.
    named = {
        object_name(artifact)
        for other in list_runs(store)
        for each in recorded_weights(store, other)
        for artifact in each.weights.artifacts
    }
    delete_unreferenced(
        store, {object_name(artifact) for each in retirable for artifact in each.weights.artifacts} - named, grace_seconds
    )
    return [each.name for each in retirable]


def _create_tombstone(store: ObjectStore, name: str) -> None:
    try:
        store.create(name, b"")
    except AlreadyExists:  # left by a killed call
        return


def _origin_of(configs: dict[str, StoredConfig], key: CheckpointKey) -> CheckpointKey:
    """Key of the run that made a checkpoint: the early iterations of a fork are its parent's."""
    for _ in configs:  # a lineage is not longer than this
        origin = configs[key.run_id].forked_from if key.run_id in configs else None
        if origin is None or key.iteration > origin.iteration:
            break
        key = CheckpointKey(origin.run_id, key.iteration)
    return key
