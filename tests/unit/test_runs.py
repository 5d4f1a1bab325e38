"""Runs in the store: numbered, found, advanced by manifests whose chain is checked."""

import hashlib
import json

import pytest

from roll_core.errors import ArtifactDamaged, IterationTaken, UserError
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.exports import is_finished
from roll_core.store.records.runs import commit, find_run, open_run, read_chain, read_config, read_manifest, summary_of
from roll_core.store.records.sealed import create_sealed
from roll_core.types.manifest import NO_PARENT, Evaluated, Manifest
from roll_core.types.refs import ArtifactKind, ArtifactRef, record_digest, record_json
from tests.stored_runs import StoredRuns, bare_manifest
from tests.support import tiny_config


def manifest(iteration: int, parent: str, accuracy: float | None = None) -> Manifest:
    artifact = ArtifactRef(kind=ArtifactKind.TRAJECTORIES, digest="0" * 64, size=0)
    evaluated = accuracy is not None and Evaluated(
        weights_version=iteration, num_problems=8, accuracy=accuracy, trajectories=artifact
    )
    return bare_manifest(
        iteration,
        parent=parent,
        config_digest="c",
        weights_digest="0" * 64,
        evaluated=evaluated or None,
        timings={"wall": 1.0},
        committed_at="2026-01-01T00:00:00+00:00",
    )


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store")


def commit_chain(store: ObjectStore, length: int) -> list[Manifest]:
    """Commit iterations 0 to `length` - 1 of tiny-1; return their manifests."""
    chain: list[Manifest] = []
    for iteration in range(length):
        chain.append(manifest(iteration, record_digest(chain[-1]) if chain else NO_PARENT, accuracy=iteration / 10))
        commit(store, chain[-1])
    return chain


def test_runs_of_a_name_are_numbered(store, tmp_path):
    config = tiny_config(tmp_path)
    assert [open_run(store, config).run_id for _ in range(3)] == ["tiny-1", "tiny-2", "tiny-3"]


def test_a_run_is_found_with_the_config_it_was_opened_with(store, tmp_path):
    config = tiny_config(tmp_path)
    opened = open_run(store, config)
    assert find_run(store, "tiny-1") == opened
    assert read_config(opened) == config


def test_an_unknown_run_is_refused_with_the_runs_there_are(store, tmp_path):
    open_run(store, tiny_config(tmp_path))
    with pytest.raises(UserError, match="there is no run 'tiny-9' in .*; runs there: tiny-1"):
        find_run(store, "tiny-9")


def test_a_config_changed_after_the_run_was_opened_is_refused(store, tmp_path):
    opened = open_run(store, tiny_config(tmp_path))
    name = "runs/tiny-1/config.json"
    changed = store.read(name).replace(b'"iterations": 2', b'"iterations": 9')
    store.delete(name)
    store.create(name, changed)
    with pytest.raises(ArtifactDamaged, match="runs/tiny-1/config.json in .* is not what was written"):
        read_config(opened)
    with pytest.raises(ArtifactDamaged, match="runs/tiny-1/config.json"):
        find_run(store, "tiny-1")


def test_the_chain_is_what_was_committed_in_order(store):
    assert read_chain(store, "tiny-1") == []
    chain = commit_chain(store, 3)
    assert read_chain(store, "tiny-1") == chain
    assert read_manifest(store, "tiny-1", 2) == chain[2]
    assert read_manifest(store, "tiny-1", 3) is None


def test_a_manifest_that_names_another_parent_is_an_error_that_names_it(store):
    commit_chain(store, 2)
    commit(store, manifest(2, "some other parent"))
    with pytest.raises(ArtifactDamaged, match="iterations/00000002.json .* does not continue the iteration before it"):
        read_chain(store, "tiny-1")


def replace(store: ObjectStore, name: str, data: bytes) -> None:
    """Overwrite a record, which the store itself never does."""
    store.delete(name)
    store.create(name, data)


def manifest_name(iteration: int, run_id: str = "tiny-1") -> str:
    return f"runs/{run_id}/iterations/{iteration:08d}.json"


@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_every_changed_bit_of_a_manifest_is_noticed_wherever_it_is_in_the_chain(store, iteration):
    commit_chain(store, 3)
    name = manifest_name(iteration)
    whole = store.read(name)
    for position in range(0, len(whole), 7):
        replace(store, name, whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(ArtifactDamaged, match=name):
            read_chain(store, "tiny-1")


@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_a_truncated_manifest_is_an_error_and_not_the_end_of_the_run(store, iteration):
    commit_chain(store, 3)
    name = manifest_name(iteration)
    for keep in (0, 10, len(store.read(name)) - 1):
        replace(store, name, store.read(name)[:keep])
        with pytest.raises(ArtifactDamaged, match=name):
            read_chain(store, "tiny-1")


def test_a_manifest_missing_before_the_newest_is_named(store):
    commit_chain(store, 3)
    store.delete(manifest_name(1))
    with pytest.raises(
        ArtifactDamaged, match="iterations/00000001.json is missing from .*, though later iterations are there"
    ):
        read_chain(store, "tiny-1")


def test_without_its_newest_manifest_a_run_ends_where_it_was_before_that_commit(store):
    chain = commit_chain(store, 3)
    store.delete(manifest_name(2))
    assert read_chain(store, "tiny-1") == chain[:2]


def test_swapped_manifests_are_noticed(store):
    commit_chain(store, 3)
    first, second = store.read(manifest_name(1)), store.read(manifest_name(2))
    replace(store, manifest_name(1), second)
    replace(store, manifest_name(2), first)
    with pytest.raises(ArtifactDamaged, match="iterations/00000001.json"):
        read_chain(store, "tiny-1")


def test_the_config_of_another_run_is_not_taken_for_this_one(store, tmp_path):
    for _ in range(2):
        open_run(store, tiny_config(tmp_path))
    replace(store, "runs/tiny-1/config.json", store.read("runs/tiny-2/config.json"))
    with pytest.raises(ArtifactDamaged, match="runs/tiny-1/config.json"):
        find_run(store, "tiny-1")


def test_a_manifest_is_json_that_a_person_can_read_and_check(store):
    (committed,) = commit_chain(store, 1)
    text = store.read(manifest_name(0)).decode()
    sealed = json.loads(text)
    assert sealed["name"] == manifest_name(0)
    assert Manifest.model_validate(sealed["content"]) == committed
    content = text.partition('"content":\n')[2].removesuffix("\n}\n")
    assert hashlib.sha256(content.encode()).hexdigest() == sealed["sha256"]
    assert '\n "iteration": 0,\n' in content


def test_a_metric_that_is_not_a_number_can_be_read_back(store):
    odd = manifest(0, NO_PARENT).model_copy(update={"metrics": {"update/gradient_norm": float("inf"), "x": float("nan")}})
    commit(store, odd)
    (found,) = read_chain(store, "tiny-1")
    assert found.metrics["update/gradient_norm"] == float("inf")
    assert found.metrics["x"] != found.metrics["x"]


def test_an_iteration_is_committed_once(store):
    first = commit_chain(store, 1)[0]
    with pytest.raises(IterationTaken, match="iteration 0 of tiny-1 was committed by another leg"):
        commit(store, manifest(0, NO_PARENT, accuracy=0.9))
    assert read_chain(store, "tiny-1") == [first]


def test_the_summary_is_the_curve_of_evaluations(store):
    summary = summary_of("tiny-1", commit_chain(store, 4))
    assert summary.curve == ((0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3))
    assert summary.sentence == "held-out accuracy 0.00 -> 0.30 in 3 iterations"


def test_a_manifest_without_its_seal_is_refused(store):
    chain = commit_chain(store, 2)
    replace(store, manifest_name(1), record_json(chain[1]))
    with pytest.raises(ArtifactDamaged, match="iterations/00000001.json in .* is not what was written under that name"):
        read_chain(store, "tiny-1")


def test_a_chain_written_before_a_field_existed_is_still_valid(store):
    """A manifest names the digest of its parent's bytes, and the field is not in those bytes."""
    first = {k: v for k, v in json.loads(manifest(0, NO_PARENT).model_dump_json()).items() if k != "code"}
    first_json = json.dumps(first, separators=(",", ":")).encode()
    second = first | {"iteration": 1, "parent": hashlib.sha256(first_json).hexdigest()}
    create_sealed(store, manifest_name(0), first_json)
    create_sealed(store, manifest_name(1), json.dumps(second, separators=(",", ":")).encode())
    assert [m.iteration for m in read_chain(store, "tiny-1")] == [0, 1]


@pytest.mark.parametrize("export_at_end", [True, False])
def test_a_run_is_finished_once_its_last_checkpoint_and_its_export_are_stored(tmp_path, export_at_end):
    stored = StoredRuns(tmp_path)
    run_id = stored.open(checkpoint={"every": 1, "export_at_end": export_at_end})
    run = find_run(stored.store, run_id)
    assert not is_finished(run), "nothing is committed"
    stored.commit(run_id, upto=98)
    stored.checkpoint(run_id, 98)
    assert not is_finished(run), "one iteration is missing"
    stored.commit(run_id, upto=99)
    assert not is_finished(run), "killed before its last checkpoint was stored"
    stored.checkpoint(run_id, 99)
    assert is_finished(run) is not export_at_end
    stored.export(run_id, 99)
    assert is_finished(run)
