"""Forks: runs that continue from an iteration of another run with a changed config, and the lineage of such runs."""

from collections.abc import Sequence

from roll_core.config.load import override_config
from roll_core.config.run import ForkedFrom, RunConfig, flat_config
from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import OwnedCheckpoint, checkpoints_to_resume
from roll_core.store.records.runs import find_run, read_config
from roll_core.types.manifest import Manifest
from roll_core.types.refs import Record


class Ancestor(Record):
    """Run and iteration that a fork continues, and how the fork's config differs.

    Example: Ancestor(run_id="quickstart-1", iteration=20, changes=("seed 0 -> 1",))
    """

    run_id: str
    iteration: int
    changes: tuple[str, ...]
    """Config keys that differ in the child, as "KEY OLD -> NEW"."""


def forked_config(store: ObjectStore, run_id: str, iteration: int, overrides: Sequence[str]) -> RunConfig:
    """Config of a fork: the parent's config with the overrides applied and `forked_from` set."""
    parent = read_config(find_run(store, run_id))
    forked = parent.model_copy(update={"forked_from": ForkedFrom(run_id=run_id, iteration=iteration)})
    return override_config(forked, overrides, f"a fork of {run_id}")


def checkpoints_from_origin(
    store: ObjectStore, chain: Sequence[Manifest], origin: ForkedFrom | None
) -> list[OwnedCheckpoint]:
    """Checkpoints from which a run can resume, in the order to try them: a fork does not resume from before its origin.

    Replaying the parent's updates from there with the fork's config would give other weights. Raises ArtifactDamaged if
    there is none.
    """
    checkpoints = checkpoints_to_resume(store, chain)
    if origin is None or chain[-1].iteration < origin.iteration:  # a replay of an iteration before the fork
        return checkpoints
    later = [each for each in checkpoints if each.checkpoint.iteration >= origin.iteration]
    if not later:
        raise ArtifactDamaged(
            f"forked_from.iteration: the checkpoint of {origin.run_id}@{origin.iteration} is no longer in {store.uri}: "
            f"fork from another iteration, or restore runs/{origin.run_id}/checkpoints from a copy"
        )
    return later


def lineage(store: ObjectStore, config: RunConfig) -> list[Ancestor]:
    """Ancestors of a run, from its parent to the first run of the lineage; empty if it is not a fork."""
    ancestors: list[Ancestor] = []
    while (origin := config.forked_from) is not None:
        parent = read_config(find_run(store, origin.run_id))
        ancestors.append(Ancestor(run_id=origin.run_id, iteration=origin.iteration, changes=_changes(parent, config)))
        config = parent
    return ancestors


def _changes(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    old, new = flat_config(before), flat_config(after)
    return tuple(
        f"{key} {old.get(key, 'none')} -> {new.get(key, 'none')}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not key.startswith("forked_from")
    )
