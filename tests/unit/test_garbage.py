"""Garbage collection: old objects that no record reaches are removed, and nothing is removed if a record is unreadable."""

import errno
import os

import pytest

from flows.cli import main as roll
from roll_core.errors import ArtifactDamaged, UserError
from roll_core.store.media import folder
from roll_core.store.object_store import object_name
from roll_core.store.records.checkpoints import checkpoint_record_name
from roll_core.store.upkeep.garbage import find_garbage, longest_grace_minutes, remove
from roll_core.types.refs import ArtifactKind
from tests.stored_runs import StoredRuns

HOUR = 3600.0


@pytest.fixture
def runs(tmp_path) -> StoredRuns:
    """Store with tiny-1, its checkpoints and an export, and a fork of tiny-1 with a checkpoint."""
    runs = StoredRuns(tmp_path)
    runs.write_tiny()
    child = runs.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 2})
    runs.commit(child, 5)
    runs.checkpoint(child, 4)
    return runs


def collect_garbage(runs: StoredRuns) -> list[str]:
    """Remove the garbage; return the names of the removed objects, sorted."""
    return sorted(stored.name for stored in remove(runs.store, find_garbage(runs.store, HOUR)))


def test_unreferenced_objects_are_removed_and_all_that_runs_reference_stay(runs):
    needed = runs.objects()
    unreferenced = [object_name(runs.store.put(kind.encode(), kind)) for kind in ArtifactKind]
    runs.make_all_old()
    assert collect_garbage(runs) == sorted(unreferenced)
    assert runs.objects() == needed


def test_a_young_object_stays_because_a_run_may_be_about_to_reference_it(runs):
    runs.make_all_old()
    uncommitted = object_name(runs.store.put(b"rollouts of an iteration not committed yet", ArtifactKind.TRAJECTORIES))
    assert collect_garbage(runs) == []
    assert uncommitted in runs.objects()


def test_finding_garbage_removes_nothing_and_reports_sizes(runs):
    runs.store.put(b"12345", ArtifactKind.TRAJECTORIES)
    runs.make_all_old()
    before = runs.objects()
    assert [stored.size for stored in find_garbage(runs.store, HOUR)] == [5]
    assert runs.objects() == before


def test_files_of_a_retired_checkpoint_are_removed_unless_another_checkpoint_references_them(runs):
    checkpoint = runs.checkpoint("tiny-1", 3)
    runs.store.delete(checkpoint_record_name("tiny-1", checkpoint))
    runs.make_all_old()
    assert collect_garbage(runs) == [object_name(checkpoint.files[0].artifact)]


@pytest.mark.parametrize(
    "name",
    ["runs/tiny-1/iterations/00000002.json", "runs/child-1/config.json", "runs/tiny-1/exports", "runs/child-1/checkpoints"],
)
def test_an_unreadable_record_stops_the_collection_before_anything_is_removed(runs, name):
    runs.store.put(b"nobody's", ArtifactKind.TRAJECTORIES)
    runs.make_all_old()
    before = runs.objects()
    damaged = name if "json" in name else f"{name}/{next(iter(runs.store.list(name)))}"
    data = runs.store.read(damaged)
    runs.store.delete(damaged)
    runs.store.create(damaged, data[:-9])
    with pytest.raises(ArtifactDamaged, match=damaged):
        collect_garbage(runs)
    assert runs.objects() == before


@pytest.mark.parametrize("name", ["runs/tiny-1/iterations/00000001.json", "runs/child-1/config.json"])
def test_a_missing_record_stops_the_collection_before_anything_is_removed(runs, name):
    runs.store.delete(name)
    runs.make_all_old()
    before = runs.objects()
    with pytest.raises(ArtifactDamaged):
        collect_garbage(runs)
    assert runs.objects() == before


def test_a_store_without_runs_is_refused_instead_of_emptied(tmp_path):
    runs = StoredRuns(tmp_path)
    runs.store.put(b"x", ArtifactKind.TRAJECTORIES)
    runs.make_all_old()
    with pytest.raises(UserError, match="there is no run in"):
        collect_garbage(runs)
    assert len(runs.objects()) == 1


def test_the_longest_grace_period_of_all_runs_counts(runs, tmp_path):
    assert longest_grace_minutes(runs.store) == 60.0
    runs.open(name="slow", store={"uri": str(tmp_path / "store"), "grace_minutes": 600})
    assert longest_grace_minutes(runs.store) == 600.0


def test_an_object_that_is_put_again_after_it_was_listed_stays(runs):
    """A live leg puts its rollouts again before the commit that names them, while a collection is under way."""
    ref = runs.store.put(b"rollouts of a long iteration", ArtifactKind.TRAJECTORIES)
    runs.make_all_old()
    listed = list(find_garbage(runs.store, HOUR))
    assert [stored.name for stored in listed] == [object_name(ref)]
    runs.store.put(b"rollouts of a long iteration", ArtifactKind.TRAJECTORIES)
    assert list(remove(runs.store, listed)) == []
    assert runs.store.get(ref) == b"rollouts of a long iteration"


def test_a_dry_run_works_on_a_store_that_cannot_be_written_to(runs, monkeypatch, capsys):
    runs.store.put(b"12345", ArtifactKind.TRAJECTORIES)
    runs.make_all_old()

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(folder, "_partial_file", read_only)
    assert roll(["gc", "--dry-run", "--store", runs.store.uri]) == 0
    assert "1 objects, 0.0 MB, that no run names and that are 60 minutes old: would be removed" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", ["-5", "nan", "inf", "soon"])
def test_an_age_that_is_not_a_number_of_minutes_is_refused_in_one_sentence(runs, minutes, capsys):
    with pytest.raises(SystemExit) as exited:
        roll(["gc", f"--older-than={minutes}", "--store", runs.store.uri])
    assert exited.value.code == 2
    assert f"--older-than: '{minutes}' is not a number of minutes" in capsys.readouterr().err


def test_a_store_with_nothing_but_a_stray_in_runs_is_refused_instead_of_emptied(tmp_path):
    runs = StoredRuns(tmp_path)
    runs.store.put(b"x", ArtifactKind.TRAJECTORIES)
    (tmp_path / "store/runs").mkdir()
    (tmp_path / "store/runs/README").write_text("our runs")
    runs.make_all_old()
    with pytest.raises(UserError, match="there is no run in"):
        collect_garbage(runs)
