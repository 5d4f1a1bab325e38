"""Forks: runs that go on from another's iteration with another config, and what can be told about their descent."""

from collections.abc import Sequence

from roll_core.config.load import changed_config
from roll_core.config.run import ForkedFrom, RunConfig, flat_config
from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_to_resume
from roll_core.store.records.runs import find_run, read_config
from roll_core.types.manifest import Manifest
from roll_core.types.refs import Record


class Ancestor(Record):
    """Example: Ancestor(run_id="quickstart-1", iteration=20, changes=("seed 0 -> 1",))"""

    run_id: str
    iteration: int
    changes: tuple[str, ...]
    """What the child's config has different."""


def forked_config(store: ObjectStore, run_id: str, iteration: int, overrides: Sequence[str]) -> RunConfig:
    """The config of a run, changed, to go on from one of its iterations."""
    parent = read_config(find_run(store, run_id))
    forked = parent.model_copy(update={"forked_from": ForkedFrom(run_id=run_id, iteration=iteration)})
    return changed_config(forked, overrides, f"a fork of {run_id}")


def refuse_without_origin(store: ObjectStore, chain: Sequence[Manifest], origin: ForkedFrom | None) -> None:
    """A fork never goes on from before its fork: its parent's updates, made with its own config, would be others."""
    if origin is None or checkpoints_to_resume(store, chain)[-1].iteration >= origin.iteration:
        return
    raise ArtifactDamaged(
        f"forked_from.iteration: the checkpoint of {origin.run_id}@{origin.iteration} is no longer in {store.uri}: "
        f"fork from another iteration, or restore runs/{origin.run_id}/checkpoints from a copy"
    )


def lineage(store: ObjectStore, config: RunConfig) -> list[Ancestor]:
    """From the parent to the first of the line."""
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
