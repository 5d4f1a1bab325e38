"""Strays in a store, files that roll did not write: ignored with a warning, by every command and by retention."""

import logging
from datetime import UTC, datetime

import pytest

from flows.cli import main as roll
from roll_core.config.operations.legs import NodesConfig
from roll_core.config.operations.services import CheckpointConfig
from roll_core.store.records.checkpoints import checkpoints_to_resume
from roll_core.store.records.nodes import NodeFailure, excluded_nodes, read_failures, record_failure
from roll_core.store.records.runs import list_runs, read_chain
from roll_core.store.upkeep.garbage import find_garbage, remove
from roll_core.store.upkeep.retention import retire
from tests.stored_runs import StoredRuns

STRAYS = (".DS_Store", ".nfs000000000001", "README.md", "\u00b2", "00000002 copy.json", "\u0663.json")
FOLDERS = (
    *("nodes", "nodes/gpu-1", "runs", "objects", "objects/00"),
    *(f"runs/tiny-1/{name}" for name in ("iterations", "checkpoints", "exports", "weights", "retiring", "damaged")),
)


@pytest.fixture
def runs(tmp_path) -> StoredRuns:
    """Store with a run, its checkpoints and an export, and a node with two failures."""
    runs = StoredRuns(tmp_path)
    runs.write_tiny()
    for leg in (1, 2):
        at = datetime(2026, 11, 15, 20, leg, tzinfo=UTC)
        record_failure(runs.store, NodeFailure(node="gpu-1", reason="no disk", run_id="tiny-1", leg=leg, at=at))
    return runs


def read_all(runs: StoredRuns) -> list[object]:
    """Everything that commands, launches, recoveries and upkeep read."""
    store, now = runs.store, datetime(2026, 11, 15, 21, tzinfo=UTC)
    chain = read_chain(store, "tiny-1")
    return [
        *(list_runs(store), chain, checkpoints_to_resume(store, chain)),
        *(read_failures(store), excluded_nodes(store, NodesConfig(), now)),
        *(list(find_garbage(store, 0.0)), retire(store, "tiny-1", CheckpointConfig(keep_last=9), 0.0)),
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_strays_are_ignored_with_one_warning(runs, folder, caplog, capsys):
    expected = read_all(runs)
    for name in STRAYS:
        path = runs.folder / "store" / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not a record of roll")
    with caplog.at_level(logging.WARNING):
        assert read_all(runs) == expected
        warnings = [record.message for record in caplog.records if "roll did not write it" in record.message]
        assert read_all(runs) == expected
    assert len([record for record in caplog.records if "roll did not write it" in record.message]) == len(warnings)
    for arguments in (["runs"], ["show", "tiny-1"], ["gc", "--dry-run"], ["nodes"]):
        assert roll([*arguments, "--store", runs.store.uri]) == 0
    assert "tiny-1" in capsys.readouterr().out
    if folder != "nodes":
        assert warnings


def test_a_loop_of_links_below_objects_is_not_followed_and_links_are_not_deleted(runs):
    expected = read_all(runs)
    loop = runs.folder / "store/objects/loop"
    loop.symlink_to(loop)
    (runs.folder / "store/objects/up").symlink_to(runs.folder / "store")
    assert read_all(runs) == expected
    assert list(remove(runs.store, find_garbage(runs.store, 0.0))) == []
    assert roll(["gc", "--store", runs.store.uri]) == 0
    assert loop.is_symlink()


def test_an_iteration_in_digits_of_no_number_is_refused(runs, capsys):
    assert roll(["replay", "tiny-1@\u00b2", "--store", runs.store.uri]) == 2
    assert "RUN@ITERATION" in capsys.readouterr().err
