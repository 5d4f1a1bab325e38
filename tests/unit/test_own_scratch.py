"""The folder of a run in the work folder: what a new leg keeps and deletes there, and that it first holds the lease."""

from pathlib import Path

import pytest

from roll_core.errors import ArtifactDamaged, IterationTaken
from roll_core.store.records.runs import find_run, read_config
from roll_core.types.leg import LegAllocation
from roll_core.types.refs import RunRef
from tasks import services
from tasks.services import _lease, _own_scratch, open_services, run_dir
from tests.stored_runs import StoredRuns


@pytest.fixture
def fork(tmp_path) -> RunRef:
    """Fork of a run of four iterations, which has committed nothing of its own."""
    runs = StoredRuns(tmp_path)
    runs.open()
    runs.commit("tiny-1", 4)
    return find_run(runs.store, runs.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 2}))


def scratch(run: RunRef) -> Path:
    folder = run_dir(run, read_config(run))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def start_leg(run: RunRef) -> None:
    """Take over the scratch folder as a leg does."""
    scratch(run)
    with _own_scratch(run, read_config(run)):
        pass


def leave_rollouts(run: RunRef) -> list[Path]:
    """Write what a leg that dies in its first iteration leaves: a cached result, and rollouts in the spool."""
    files = [scratch(run) / "stage-cache" / "collect", scratch(run) / "spool" / "trajectories-0"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"rollouts")
    return files


def test_a_fork_whose_first_leg_died_keeps_its_first_rollouts(fork):
    start_leg(fork)
    files = leave_rollouts(fork)
    start_leg(fork)
    assert all(file.exists() for file in files)


def test_rollouts_of_a_run_of_the_same_name_with_another_config_are_not_used(fork):
    start_leg(fork)
    files = leave_rollouts(fork)
    start_leg(fork)
    other = fork.model_copy(update={"config_digest": "0" * 64})
    with _own_scratch(other, read_config(fork)):
        assert not any(file.exists() for file in files)


def test_a_run_without_manifests_keeps_nothing_of_its_name(tmp_path):
    """Its store may have been deleted since another run had this name."""
    runs = StoredRuns(tmp_path)
    run = find_run(runs.store, runs.open())
    start_leg(run)
    files = leave_rollouts(run)
    start_leg(run)
    assert not any(file.exists() for file in files)


def test_a_second_resume_touches_nothing_before_it_holds_the_lease(tmp_path, monkeypatch):
    runs = StoredRuns(tmp_path)
    run = find_run(runs.store, runs.open())
    start_leg(run)
    files = leave_rollouts(run)
    monkeypatch.setattr(services, "LEASE_WAIT_S", 0.0)
    with (
        _lease(run, read_config(run)),
        pytest.raises(IterationTaken, match="another leg of tiny-1 is alive"),
        open_services(run, 2, LegAllocation(ends_at=None, ray_address=None, scratch=None)),
    ):
        pass
    assert all(file.exists() for file in files)


def test_a_leg_that_finds_damage_drops_cached_results_and_keeps_the_spool(fork):
    start_leg(fork)
    cached, spooled = leave_rollouts(fork)
    with pytest.raises(ArtifactDamaged), _own_scratch(fork, read_config(fork)):
        raise ArtifactDamaged("store: trajectories objects/00/11 is missing")
    assert not cached.exists()
    assert spooled.exists()
