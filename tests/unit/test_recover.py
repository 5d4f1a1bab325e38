"""Recovery: which checkpoint a new leg resumes from, and whether it stores one that its predecessor could not."""

import contextlib
from types import SimpleNamespace

import pytest

from benchmarks import damage
from roll_core.config.run import ForkedFrom
from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.store.records.checkpoints import checkpoint_record_name, download_files, record_checkpoint
from roll_core.types.refs import CheckpointRef
from tasks.recover import is_checkpoint_overdue, restore_trainer
from tasks.stages import checkpoint_committed
from tests.support import tiny_config
from tests.unit.test_checkpoint_records import manifest


@pytest.mark.parametrize(
    ("iteration", "num_replayed", "is_overdue"),
    [
        (5, 1, False),  # a checkpoint every 4 iterations: 4 was loaded, and none was due since
        (8, 4, True),  # the checkpoint of 8 was being stored
        (9, 5, True),
        (4, 0, False),
        (10, 2, True),  # the last of the run, which always has one
        (10, 0, False),
    ],
)
def test_a_checkpoint_that_was_lost_with_its_leg_is_stored_again(tmp_path, iteration, num_replayed, is_overdue):
    config = tiny_config(tmp_path, iterations=10, checkpoint={"every": 4})
    assert is_checkpoint_overdue(manifest("a-1", iteration), num_replayed, config) is is_overdue


class FetchingFleet:
    """Trainer without a model: it downloads checkpoints and rollouts as a real one does, and keeps their iterations."""

    has_critic = False

    def __init__(self, store: ObjectStore, folder, needs_reference: bool = False, origin: ForkedFrom | None = None):
        self.needs_reference, self.origin = needs_reference, origin
        self.reference: int | None = None
        self.restored: list[int] = []
        self.replayed: list[int] = []
        self._store, self._folder = store, folder

    def load_reference(self, checkpoint: CheckpointRef) -> None:
        download_files(self._store, checkpoint, self._folder)
        self.reference = checkpoint.iteration

    def restore(self, checkpoint: CheckpointRef) -> None:
        download_files(self._store, checkpoint, self._folder)
        self.restored.append(checkpoint.iteration)

    def prepare(self, collected) -> None:
        self._store.get(collected.trajectories)

    def update(self, collected) -> SimpleNamespace:
        self.replayed.append(collected.request.iteration)
        return SimpleNamespace(metrics={})


@pytest.fixture
def stored(tmp_path):
    """Run of ten iterations with checkpoints of 0, 4 and 8."""
    store = ObjectStore(f"file://{tmp_path}/store")
    written = damage.write_runs(store, tmp_path, num_runs=1, num_iterations=10, large_file=1000)
    (run,) = written.runs
    return SimpleNamespace(
        store=store, run_id=run.run_id, chain=written.chains[run.run_id], checkpoints=written.checkpoints[run.run_id]
    )


def flip(store: ObjectStore, name: str) -> bytes:
    """Change one byte of an object; return the original."""
    data = store.read(name)
    store.replace(name, bytes([data[0] ^ 1]) + data[1:])
    return data


def damage_file(stored, number: int) -> tuple[str, bytes]:
    """Damage the first file of a checkpoint; return its name and its original bytes."""
    name = object_name(stored.checkpoints[number].files[0].artifact)
    return name, flip(stored.store, name)


def test_a_damaged_newest_checkpoint_is_replaced_by_the_one_before_and_a_longer_replay(stored, tmp_path, caplog):
    damage_file(stored, -1)
    fleet = FetchingFleet(stored.store, tmp_path / "restored")
    assert restore_trainer(stored.chain, stored.store, fleet) == 6
    assert (fleet.restored, fleet.replayed) == ([4], [5, 6, 7, 8, 9, 10])
    assert f"the checkpoint of {stored.run_id}@8 is damaged and not used" in caplog.text


def test_a_missing_file_of_a_checkpoint_is_damage_too(stored, tmp_path):
    stored.store.delete(object_name(stored.checkpoints[-1].files[-1].artifact))
    fleet = FetchingFleet(stored.store, tmp_path / "restored")
    assert restore_trainer(stored.chain, stored.store, fleet) == 6


def test_a_damaged_record_of_the_newest_checkpoint_is_not_the_end_of_the_run(stored, tmp_path, caplog):
    name = checkpoint_record_name(stored.run_id, stored.checkpoints[-1])
    flip(stored.store, name)
    fleet = FetchingFleet(stored.store, tmp_path / "restored")
    assert restore_trainer(stored.chain, stored.store, fleet) == 6
    assert name in caplog.text


def test_a_later_recovery_does_not_download_a_checkpoint_that_is_marked_as_damaged(stored, tmp_path, caplog):
    damage_file(stored, -1)
    restore_trainer(stored.chain, stored.store, FetchingFleet(stored.store, tmp_path / "restored"))
    caplog.clear()
    restore_trainer(stored.chain, stored.store, FetchingFleet(stored.store, tmp_path / "restored"))
    assert caplog.text == ""


def test_a_checkpoint_that_was_restored_from_a_copy_is_used_if_no_other_is_left(stored, tmp_path):
    originals = [damage_file(stored, number) for number in range(3)]
    with pytest.raises(ArtifactDamaged, match=originals[0][0]):
        restore_trainer(stored.chain, stored.store, FetchingFleet(stored.store, tmp_path / "restored"))
    stored.store.replace(*originals[1])
    fleet = FetchingFleet(stored.store, tmp_path / "restored")
    assert restore_trainer(stored.chain, stored.store, fleet) == 6
    assert len(list(stored.store.list(f"runs/{stored.run_id}/damaged"))) == 2


def test_a_checkpoint_that_is_stored_again_is_no_longer_marked(stored, tmp_path):
    name, original = damage_file(stored, -1)
    restore_trainer(stored.chain, stored.store, FetchingFleet(stored.store, tmp_path / "restored"))
    stored.store.replace(name, original)
    record_checkpoint(stored.store, stored.run_id, stored.checkpoints[-1])
    fleet = FetchingFleet(stored.store, tmp_path / "restored")
    assert restore_trainer(stored.chain, stored.store, fleet) == 2


def test_a_fork_does_not_walk_back_before_its_origin(stored, tmp_path):
    name, _ = damage_file(stored, -1)
    origin = ForkedFrom(run_id=stored.run_id, iteration=8)
    with pytest.raises(ArtifactDamaged, match=name):
        restore_trainer(stored.chain[:9], stored.store, FetchingFleet(stored.store, tmp_path / "restored", origin=origin))


def test_the_reference_policy_is_the_first_checkpoint_and_never_another(stored, tmp_path):
    fleet = FetchingFleet(stored.store, tmp_path / "restored", needs_reference=True)
    restore_trainer(stored.chain, stored.store, fleet)
    assert (fleet.reference, fleet.restored) == (0, [8])
    name = checkpoint_record_name(stored.run_id, stored.checkpoints[0])
    stored.store.delete(name)
    with pytest.raises(ArtifactDamaged, match=f"{name}, the reference policy of {stored.run_id}, is missing from"):
        restore_trainer(stored.chain, stored.store, FetchingFleet(stored.store, tmp_path / "restored", needs_reference=True))


def test_a_run_without_a_reference_policy_does_not_need_its_first_checkpoint(stored, tmp_path):
    stored.store.delete(checkpoint_record_name(stored.run_id, stored.checkpoints[0]))
    fleet = FetchingFleet(stored.store, tmp_path / "restored")
    assert restore_trainer(stored.chain, stored.store, fleet) == 2


@pytest.mark.parametrize(("holds_committed_weights", "stored_iterations"), [(True, [9]), (False, [])])
def test_weights_of_an_inexact_recovery_are_not_stored_as_those_of_the_manifest(
    stored, holds_committed_weights, stored_iterations
):
    checkpointed: list[int] = []
    fleet = SimpleNamespace(wait_for_checkpoint=lambda: None, checkpoint=lambda iteration, _: checkpointed.append(iteration))
    services = SimpleNamespace(
        fleet=fleet,
        store=stored.store,
        holds_committed_weights=holds_committed_weights,
        stage_log=SimpleNamespace(stage=lambda _: contextlib.nullcontext()),
    )
    checkpoint_committed.fn(stored.chain[9], services)
    assert checkpointed == stored_iterations


def test_a_checkpoint_whose_files_were_collected_meanwhile_is_not_recorded(stored):
    collected = stored.checkpoints[-1].files[0].artifact
    stored.store.delete(object_name(collected))
    with pytest.raises(
        ArtifactDamaged, match=f"{object_name(collected)} is missing .* the checkpoint of iteration 8 is not"
    ):
        record_checkpoint(stored.store, stored.run_id, stored.checkpoints[-1])
