"""Damage to any stored object is harmless or raises an error that names the object. Small version of `benchmarks.damage`."""

import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import damage
from benchmarks.damage import Damage, Outcome
from roll_core.errors import ArtifactDamaged
from roll_core.roles.trainer_rank import TrainerRank
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.types.refs import ArtifactKind, CheckpointFile


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.exhaustive)])
def store(request, tmp_path) -> ObjectStore:
    if request.param == "file":
        return ObjectStore(f"file://{tmp_path}/store")
    return ObjectStore(request.getfixturevalue("s3_server").new_store_uri())


def test_damage_is_detected_or_harmless_and_never_loaded(store, tmp_path):
    stored = damage.write_runs(store, tmp_path, num_runs=2, num_iterations=4, large_file=damage.LARGE_FILE)
    outcomes = damage.try_damages(store, stored, tmp_path, count=60, seed=1)
    assert sum(outcomes.values()) == 60
    assert {outcome for _, _, outcome in outcomes} <= damage.ACCEPTED
    assert damage.read_everything(store, stored, tmp_path) == damage.Findings()


def test_the_judge_reports_a_difference_that_raised_no_error(tmp_path):
    """Guard against a judge that accepts everything: here the expectation is wrong instead of the stored data."""
    store = ObjectStore(f"file://{tmp_path}/store")
    stored = damage.write_runs(store, tmp_path, num_runs=1, num_iterations=2, large_file=1000)
    (run,) = stored.runs
    chain = stored.chains[run.run_id]
    changed = chain[1].model_copy(update={"next_problem": 999})
    expected = replace(stored, chains={run.run_id: [chain[0], changed, chain[2]]})
    found = damage.read_everything(store, expected, tmp_path)
    assert damage.judge(found, {stored.names[0]}, Damage.FLIP, expected) is Outcome.SILENT


def test_only_the_newest_manifest_and_checkpoint_records_can_be_deleted_without_an_error(tmp_path):
    """Without them a run repeats its newest iteration, or resumes from an older checkpoint."""
    store = ObjectStore(f"file://{tmp_path}/store")
    stored = damage.write_runs(store, tmp_path, num_runs=1, num_iterations=4, large_file=1000)
    outcomes = {}
    for name in stored.names:
        data = store.read(name)
        store.delete(name)
        outcomes[name] = damage.judge(damage.read_everything(store, stored, tmp_path), {name}, Damage.DELETE, stored)
        store.create(name, data)
    records = {name for name in stored.names if "/checkpoints/" in name}
    assert len(records) == 2
    assert {name for name in outcomes if outcomes[name] is Outcome.REDONE} == stored.newest_manifests | records
    assert set(outcomes.values()) == {Outcome.REDONE, Outcome.DETECTED}


@pytest.mark.parametrize("kind", list(Damage))
def test_damage_changes_bytes(kind):
    originals = {"a": b"0123456789", "b": b"abc"} if kind is Damage.SWAP else {"a": b"0123456789"}
    for seed in range(100):
        changed = damage.damaged_bytes(originals, kind, random.Random(seed))
        assert all(changed[name] != data for name, data in originals.items())


class RunsCode:
    """Object whose pickle calls os.mkdir when it is read."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def test_a_checkpoint_whose_metadata_is_a_malicious_pickle_is_refused_by_name(store, tmp_path):
    """The forger may write to the store, so digest and seal of the forged checkpoint are right."""
    stored = damage.write_runs(store, tmp_path, num_runs=1, num_iterations=0, large_file=1000)
    (run,) = stored.runs
    forged = store.put(pickle.dumps(RunsCode(tmp_path / "ran")), ArtifactKind.CHECKPOINT_FILE)
    (checkpoint,) = stored.checkpoints[run.run_id]
    files = (*checkpoint.files[:-1], CheckpointFile(name="critic/.metadata", artifact=forged))
    rank = TrainerRank(stored.configs[run.run_id], run, tmp_path, rank=0, num_ranks=1)
    with pytest.raises(ArtifactDamaged, match=f"{object_name(forged)} .* it names posix.mkdir"):
        rank.fetch(checkpoint.model_copy(update={"files": files}))
    assert not (tmp_path / "ran").exists()
