"""Watching a leg: a flow announces what any process commits, and no record that it cannot read ends the leg."""

import json
import logging

import pytest

from infra.slurm.launcher import JobEnd
from roll_core.errors import ArtifactDamaged
from roll_core.store.records.runs import find_run, next_iteration, read_chain
from roll_core.store.records.sealed import create_sealed
from roll_core.types.leg import LegEnding
from tasks import progress
from tasks.legs import read_ending
from tests.stored_runs import StoredRuns


@pytest.fixture
def runs(tmp_path) -> StoredRuns:
    return StoredRuns(tmp_path)


@pytest.fixture
def run_of_newer_code(runs) -> str:
    """Run whose last iteration, 2, was committed by code that knows one more field of a manifest."""
    run_id = runs.open()
    runs.commit(run_id, upto=1)
    newer = json.loads(read_chain(runs.store, run_id)[-1].model_dump_json()) | {"iteration": 2, "a_new_field": 1}
    create_sealed(runs.store, f"runs/{run_id}/iterations/00000002.json", json.dumps(newer).encode())
    return run_id


def test_a_flow_of_older_code_goes_on_watching_a_leg_of_newer_code(runs, run_of_newer_code, caplog, monkeypatch):
    monkeypatch.setattr(progress, "get_run_logger", lambda: logging.getLogger("flow"))
    caplog.set_level(logging.INFO)
    with pytest.raises(ArtifactDamaged):
        read_chain(runs.store, run_of_newer_code)
    watch = progress.ManifestWatch(find_run(runs.store, run_of_newer_code), next_iteration=1)
    watch.poll()
    watch.poll()
    said = [record.message for record in caplog.records if record.name == "flow"]
    assert said[0].startswith("iteration 1:")
    assert said[1].startswith("iteration 2 is committed, but cannot be shown: ")
    assert len(said) == 2


def test_a_flow_of_older_code_reads_how_far_a_leg_of_newer_code_came(runs, run_of_newer_code):
    run = find_run(runs.store, run_of_newer_code)
    ended = read_ending(JobEnd(LegEnding.PREEMPTED, None, "why"), run, leg=1)
    assert (ended.ending, ended.last_iteration) == (LegEnding.PREEMPTED, 2)


def test_the_next_iteration_of_a_fork_follows_the_one_it_was_forked_from(runs):
    parent = runs.open()
    assert next_iteration(runs.store, parent) == 0
    runs.commit(parent, upto=4)
    fork = runs.open(forked_from={"run_id": parent, "iteration": 3})
    assert next_iteration(runs.store, fork) == len(read_chain(runs.store, fork)) == 4
    runs.commit(fork, upto=5)
    assert next_iteration(runs.store, fork) == 6
