"""Updates made again are the same to the bit, and a fork goes on from where its parent was."""

import pytest
from mlflow import MlflowClient

from roll_core.store.object_store import ObjectStore
from roll_core.store.rollouts import decode_trajectories, encode_trajectories
from roll_core.types.refs import record_digest
from tests.integration.conftest import Workspace, os

SETTINGS = ["--set", "iterations=4", "--set", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def parent(tmp_path_factory, prefect_home) -> Workspace:
    """tiny-1: four iterations, checkpoints after 0, 2 and 4."""
    folder = tmp_path_factory.mktemp("parent")
    workspace = Workspace(folder, os.environ | {"PREFECT_HOME": str(prefect_home), "COLUMNS": "160"})
    done = workspace.roll("run", str(workspace.config), *SETTINGS)
    assert done.returncode == 0, done.stdout
    return workspace


def test_a_replayed_update_is_the_committed_one_to_the_bit(parent):
    done = parent.roll("replay", "tiny-1@4")
    assert done.returncode == 0, done.stdout
    assert [line.split() for line in done.stdout.strip().splitlines()] == [
        ["update/loss", "equal"],
        ["update/gradient_norm", "equal"],
        ["weights", "digest", "equal"],
    ]


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
        done = parent.roll("replay", "tiny-1@3")
    finally:
        path.write_bytes(whole)
    assert done.returncode == 1
    assert f"trajectories objects/{name}" in done.stdout
    assert "is damaged" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_fork_without_changes_does_what_its_parent_did_and_shares_what_it_stored(parent):
    done = parent.roll("fork", "tiny-1@2")
    assert done.returncode == 0, done.stdout
    ours, theirs = parent.chain("tiny-2"), parent.chain("tiny-1")
    assert [m.run_id for m in ours] == ["tiny-1"] * 3 + ["tiny-2"] * 2
    assert [m.parent for m in ours[1:]] == [record_digest(m) for m in ours[:-1]]
    assert [m.weights_digest for m in ours] == [m.weights_digest for m in theirs]
    assert [m.collected.trajectories for m in ours[3:]] == [m.collected.trajectories for m in theirs[3:]]
    store = ObjectStore(f"file://{parent.folder}/roll-data/store")
    assert list(store.list("runs/tiny-2/iterations")) == ["00000003.json", "00000004.json"]


def test_a_fork_with_changes_goes_its_own_way_and_says_whose_child_it_is(parent):
    changes = ["--set", "name=faster", "--set", "training.optimizer.learning_rate=5e-3"]
    done = parent.roll("fork", "tiny-1@2", *changes)
    assert done.returncode == 0, done.stdout
    assert parent.chain("faster-1")[4].weights_digest != parent.chain("tiny-1")[4].weights_digest
    shown = parent.roll("show", "faster-1").stdout
    assert "forked   tiny-1@2: name tiny -> faster, training.optimizer.learning_rate 0.001 -> 0.005" in shown
    client = MlflowClient(f"sqlite:///{parent.folder}/roll-data/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("roll").experiment_id], "tags.`roll.forked_from` = 'tiny-1@2'")
    assert "faster-1" in {run.info.run_name for run in runs}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fork", "tiny-1@3"], "forked_from.iteration: tiny-1 has no checkpoint of iteration 3; it has [0, 2, 4]"),
        (["fork", "tiny-1@4"], "iterations (4) must be above forked_from.iteration (4)"),
        (["fork", "tiny-1@2", "--set", "model.hidden_size=32"], "model: a fork of tiny-1 goes on with its model"),
        (["fork", "tiny-9@2"], "there is no run 'tiny-9'"),
        (["replay", "tiny-1@9"], "RUN@ITERATION: tiny-1 has iterations 1 to 4 to replay, not 9"),
        (["replay", "tiny-1"], "RUN@ITERATION: 'tiny-1' is not one; write it like quickstart-1@12"),
    ],
)
def test_what_cannot_be_is_refused(parent, arguments, says):
    done = parent.roll(*arguments)
    assert done.returncode == 2, done.stdout
    (line,) = done.stdout.strip().splitlines()
    assert says in line
