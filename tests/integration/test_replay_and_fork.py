"""Replays are equal to the bit, forks continue where their parent was, policies are exported as folders; a run that retires
checkpoints keeps enough for all of that."""

from pathlib import Path

import pytest
from mlflow import MlflowClient
from safetensors import safe_open

from roll_core.store.records.exports import read_exports
from roll_core.store.records.rollouts import decode_trajectories, encode_trajectories
from roll_core.store.upkeep.garbage import reachable_objects
from roll_core.types.refs import ArtifactKind, digest_of, record_digest
from tests.integration.conftest import MLFLOW_DATABASE, TRACKED, Workspace

KEEPING = ("iterations=4", "checkpoint={every: 1, keep_last: 1, keep_every: 2}", "store.grace_minutes=0")


@pytest.fixture(scope="module")
def parent(new_workspace, tracked) -> Workspace:
    """Workspace with tiny-1: four iterations, a checkpoint after each, of which those of 1 and 3 are retired."""
    workspace = tracked(new_workspace("parent"))
    workspace.train(*KEEPING)
    return workspace


def test_a_replayed_update_is_the_committed_one_to_the_bit(parent):
    exit_code, output = parent.roll_here("replay", "tiny-1@4")
    assert exit_code == 0, output
    assert [line.split() for line in output.strip().splitlines()] == [
        ["update/loss", "equal"],
        ["update/gradient_norm", "equal"],
        ["weights", "digest", "equal"],
    ]


@pytest.mark.exhaustive
def test_a_stored_batch_changed_by_one_rounding_step_is_noticed(parent):
    collected = parent.chain()[3].collected
    name = f"{collected.trajectories.digest[:2]}/{collected.trajectories.digest[2:]}"
    path = parent.folder / "roll-data/store/objects" / name
    whole = path.read_bytes()
    trajectories = decode_trajectories(whole)
    logprobs = trajectories[0].turns[0].sampler_logprobs
    logprobs_changed = (logprobs[0] * (1 + 2**-23), *logprobs[1:])
    object.__setattr__(trajectories[0].turns[0], "sampler_logprobs", logprobs_changed)
    path.write_bytes(encode_trajectories(trajectories))
    try:
        exit_code, output = parent.roll_here("replay", "tiny-1@3")
    finally:
        path.write_bytes(whole)
    assert exit_code == 1
    assert f"trajectories objects/{name}" in output
    assert "is damaged" in output
    assert "Traceback" not in output


def test_a_fork_without_changes_does_what_its_parent_did_and_shares_what_it_stored(parent):
    ours, theirs = parent.fork("tiny-1", 2), parent.chain("tiny-1")
    assert [m.run_id for m in ours] == ["tiny-1"] * 3 + ["tiny-2"] * 2
    assert [m.parent for m in ours[1:]] == [record_digest(m) for m in ours[:-1]]
    assert [m.weights_digest for m in ours] == [m.weights_digest for m in theirs]
    assert [m.collected.trajectories for m in ours[3:]] == [m.collected.trajectories for m in theirs[3:]]
    assert list(parent.store.list("runs/tiny-2/iterations")) == ["00000003.json", "00000004.json"]


@pytest.mark.exhaustive
def test_a_fork_with_changes_goes_its_own_way_and_names_its_parent(parent):
    forked = parent.fork("tiny-1", 2, "name=faster", "training.optimizer.learning_rate=5e-3", TRACKED)
    assert forked[4].weights_digest != parent.chain("tiny-1")[4].weights_digest
    shown = parent.printed("show", "faster-1")
    assert "forked   tiny-1@2: name tiny -> faster, " in shown
    assert "training.optimizer.learning_rate 0.001 -> 0.005" in shown
    client = MlflowClient(f"sqlite:///{parent.folder}/{MLFLOW_DATABASE}")
    runs = client.search_runs([client.get_experiment_by_name("roll").experiment_id], "tags.`roll.forked_from` = 'tiny-1@2'")
    assert "faster-1" in {run.info.run_name for run in runs}


def objects(workspace: Workspace) -> set[str]:
    return {stored.name for stored in workspace.store.list_below("objects")}


def weights_in(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "numpy") as file:
            found |= {name: digest_of(file.get_tensor(name).tobytes()) for name in file.keys()}  # noqa: SIM118
    return found


def test_checkpoints_are_those_that_the_policy_keeps_and_the_files_of_others_are_gone(parent):
    assert [checkpoint.iteration for checkpoint in parent.checkpoints()] == [0, 2, 4]
    assert objects(parent) == reachable_objects(parent.store, 0.0)


def test_gc_says_what_it_would_remove_removes_it_and_then_finds_nothing(parent):
    lost = parent.store.put(b"unreachable", ArtifactKind.TRAJECTORIES)
    assert parent.printed("gc", "--older-than", "60").startswith("0 objects, 0.0 MB")
    assert parent.printed("gc", "--dry-run").startswith("1 objects, 0.0 MB")
    assert parent.store.get(lost) == b"unreachable"
    assert "1 objects" in parent.printed("gc")
    assert objects(parent) == reachable_objects(parent.store, 0.0)
    assert parent.printed("gc").startswith("0 objects")


def test_the_last_policy_is_copied_from_the_store_and_an_earlier_one_is_written_by_roles(parent):
    assert [export.iteration for export in read_exports(parent.store, "tiny-1")] == [4]
    assert parent.printed("export", "tiny-1", "last") == "the policy of tiny-1@4 is in last\n"
    assert parent.roll_here("export", "tiny-1@2", "middle") == (0, "the policy of tiny-1@2 is in middle\n")
    last, middle = weights_in(parent.folder / "last"), weights_in(parent.folder / "middle")
    assert last.keys() == middle.keys()
    assert last != middle
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (parent.folder / "middle").iterdir()}
    assert list(parent.folder.glob("*.partial-*")) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fork", "tiny-1@3"], "forked_from.iteration: tiny-1 has no checkpoint of iteration 3; it has [0, 2, 4]"),
        (["fork", "tiny-1@4"], "iterations (4) must be above forked_from.iteration (4)"),
        (["fork", "tiny-1@2", "--set", "model.hidden_size=32"], "model: a fork of tiny-1 goes on with its model"),
        (["export", "tiny-1@3", "out"], "RUN@ITERATION: tiny-1 has no checkpoint of iteration 3; it has [0, 2, 4]"),
        (["export", "tiny-1@99", "out"], "RUN@ITERATION: tiny-1 has no checkpoint of iteration 99; it has [0, 2, 4]"),
        (["export", "tiny-1@x", "out"], "RUN@ITERATION: 'tiny-1@x' is not one"),
        (["export", "tiny-1", "."], "FOLDER: . is there already: name a new one, or empty it"),
        (["export", "tiny-1", "tiny.yaml/x"], "FOLDER: cannot write to tiny.yaml/x"),
        (["gc", "--store", "elsewhere"], "there is no run in"),
        (["fork", "tiny-9@2"], "there is no run 'tiny-9'"),
        (["replay", "tiny-1@9"], "RUN@ITERATION: tiny-1 has iterations 1 to 4 to replay, not 9"),
        (["replay", "tiny-1"], "RUN@ITERATION: 'tiny-1' is not one; write it like quickstart-1@12"),
    ],
)
def test_what_cannot_be_is_refused(parent, arguments, says):
    assert says in parent.refused(*arguments)
