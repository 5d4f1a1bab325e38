"""Checkpoint records: which checkpoints belong to a chain of manifests, and which of them a run can resume from."""

import pytest

from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_of, checkpoints_to_resume, read_checkpoints, record_checkpoint
from roll_core.types.manifest import Manifest
from roll_core.types.refs import ArtifactKind, CheckpointFile, CheckpointRef
from tests.stored_runs import bare_manifest


def manifest(run_id: str, iteration: int) -> Manifest:
    return bare_manifest(iteration, run_id=run_id, weights_digest=f"{iteration:064d}")


def checkpoint(store: ObjectStore, iteration: int, digest: str | None = None) -> CheckpointRef:
    file = CheckpointFile(name=".metadata", artifact=store.put(b"%d" % iteration, ArtifactKind.CHECKPOINT_FILE))
    return CheckpointRef(
        iteration=iteration, weights_version=iteration, weights_digest=digest or f"{iteration:064d}", files=(file,)
    )


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}")


def test_a_checkpoint_exists_once_it_is_recorded_and_recording_it_again_changes_nothing(store):
    chain = [manifest("a-1", iteration) for iteration in range(5)]
    ours = [checkpoint(store, 0), checkpoint(store, 3)]
    assert checkpoints_of(store, chain) == []
    for each in [*reversed(ours), ours[0]]:
        record_checkpoint(store, "a-1", each)
    assert checkpoints_of(store, chain) == ours


def test_a_checkpoint_of_a_leg_whose_commit_was_refused_does_not_belong_to_the_run(store):
    record_checkpoint(store, "a-1", checkpoint(store, 0))
    record_checkpoint(store, "a-1", checkpoint(store, 2, digest="f" * 64))
    chain = [manifest("a-1", iteration) for iteration in range(3)]
    assert [each.iteration for each in checkpoints_of(store, chain)] == [0]
    record_checkpoint(store, "a-1", checkpoint(store, 2))
    assert [each.iteration for each in checkpoints_of(store, chain)] == [0, 2]
    assert len(read_checkpoints(store, "a-1")) == 3


def test_a_checkpoint_of_an_uncommitted_iteration_is_not_resumed_from(store):
    record_checkpoint(store, "a-1", checkpoint(store, 0))
    record_checkpoint(store, "a-1", checkpoint(store, 4))
    assert [each.iteration for each in checkpoints_of(store, [manifest("a-1", i) for i in range(4)])] == [0]


def test_a_forks_checkpoints_are_its_own_and_those_of_its_parent_up_to_the_fork(store):
    for iteration in (0, 2, 4):
        record_checkpoint(store, "parent-1", checkpoint(store, iteration))
    record_checkpoint(store, "child-1", checkpoint(store, 3))
    chain = [manifest("parent-1", 0), manifest("parent-1", 1), manifest("parent-1", 2), manifest("child-1", 3)]
    assert [each.iteration for each in checkpoints_of(store, chain)] == [0, 2, 3]


def test_a_run_whose_checkpoints_are_gone_says_what_to_restore(store):
    with pytest.raises(ArtifactDamaged, match="restore runs/a-1/checkpoints from a copy"):
        checkpoints_to_resume(store, [manifest("a-1", 0)])


def test_a_damaged_record_is_named(store, tmp_path):
    record_checkpoint(store, "a-1", checkpoint(store, 0))
    (path,) = (tmp_path / "runs/a-1/checkpoints").iterdir()
    path.write_bytes(path.read_bytes().replace(b'"iteration": 0', b'"iteration": 9'))
    with pytest.raises(ArtifactDamaged, match=path.name):
        checkpoints_of(store, [manifest("a-1", 0)])
