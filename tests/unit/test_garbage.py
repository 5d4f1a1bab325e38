"""Garbage is what nothing reaches and nobody has just put; without knowing what is reached, nothing goes."""

import pytest

from roll_core.errors import ArtifactDamaged, UserError
from roll_core.store.object_store import object_name
from roll_core.store.records.checkpoints import checkpoint_record_name
from roll_core.store.upkeep.garbage import find_garbage, longest_grace_minutes, remove
from roll_core.types.refs import ArtifactKind
from tests.stored_runs import StoredRuns

HOUR = 3600.0


@pytest.fixture
def runs(tmp_path) -> StoredRuns:
    """tiny-1 with checkpoints and an export, its fork, and something old that nobody names."""
    runs = StoredRuns(tmp_path)
    runs.open()
    runs.commit("tiny-1", 4)
    for iteration in (0, 2, 4):
        runs.checkpoint("tiny-1", iteration)
    runs.export("tiny-1", 4)
    child = runs.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 2})
    runs.commit(child, 5)
    runs.checkpoint(child, 4)
    return runs


def collect(runs: StoredRuns) -> list[str]:
    return sorted(stored.name for stored in remove(runs.store, find_garbage(runs.store, HOUR)))


def test_what_nobody_names_goes_and_all_that_runs_name_stays(runs):
    needed = runs.objects()
    nobodys = [object_name(runs.store.put(kind.encode(), kind)) for kind in ArtifactKind]
    runs.make_all_old()
    assert collect(runs) == sorted(nobodys)
    assert runs.objects() == needed


def test_what_is_young_stays_since_a_run_may_be_about_to_name_it(runs):
    runs.make_all_old()
    on_its_way = object_name(runs.store.put(b"rollouts of an iteration not committed yet", ArtifactKind.TRAJECTORIES))
    assert collect(runs) == []
    assert on_its_way in runs.objects()


def test_finding_removes_nothing_and_tells_sizes(runs):
    runs.store.put(b"12345", ArtifactKind.TRAJECTORIES)
    runs.make_all_old()
    before = runs.objects()
    assert [stored.size for stored in find_garbage(runs.store, HOUR)] == [5]
    assert runs.objects() == before


def test_the_files_of_a_retired_checkpoint_go_but_for_those_that_another_names(runs):
    checkpoint = runs.checkpoint("tiny-1", 3)
    runs.store.delete(checkpoint_record_name("tiny-1", checkpoint))
    runs.make_all_old()
    assert collect(runs) == [object_name(checkpoint.files[0].artifact)]


@pytest.mark.parametrize(
    "name",
    ["runs/tiny-1/iterations/00000002.json", "runs/child-1/config.json", "runs/tiny-1/exports", "runs/child-1/checkpoints"],
)
def test_one_record_that_cannot_be_read_stops_it_before_anything_goes(runs, name):
    runs.store.put(b"nobody's", ArtifactKind.TRAJECTORIES)
    runs.make_all_old()
    before = runs.objects()
    damaged = name if "json" in name else f"{name}/{next(iter(runs.store.list(name)))}"
    data = runs.store.read(damaged)
    runs.store.delete(damaged)
    runs.store.create(damaged, data[:-9])
    with pytest.raises(ArtifactDamaged, match=damaged):
        collect(runs)
    assert runs.objects() == before


@pytest.mark.parametrize("name", ["runs/tiny-1/iterations/00000001.json", "runs/child-1/config.json"])
def test_a_record_that_is_missing_stops_it_too(runs, name):
    runs.store.delete(name)
    runs.make_all_old()
    before = runs.objects()
    with pytest.raises(ArtifactDamaged):
        collect(runs)
    assert runs.objects() == before


def test_a_store_without_runs_is_a_wrong_address_and_not_all_garbage(tmp_path):
    runs = StoredRuns(tmp_path)
    runs.store.put(b"x", ArtifactKind.TRAJECTORIES)
    runs.make_all_old()
    with pytest.raises(UserError, match="there is no run in"):
        collect(runs)
    assert len(runs.objects()) == 1


def test_the_most_patient_run_decides_what_is_young(runs, tmp_path):
    assert longest_grace_minutes(runs.store) == 60.0
    runs.open(name="slow", store={"uri": str(tmp_path / "store"), "grace_minutes": 600})
    assert longest_grace_minutes(runs.store) == 600.0
