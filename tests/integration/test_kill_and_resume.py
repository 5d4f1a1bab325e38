"""A run that is killed or stopped says how to resume it, and finishes as one run in the store and in MLflow.

Bit-exactness after kills is asserted in `test_chaos.py`.
"""

import os
import signal

from mlflow import MlflowClient

from roll_core.types.leg import LegEnding
from tests.integration.conftest import MLFLOW_DATABASE, REHEARSED, TRACKED, Workspace, settings, wait_until


def mlflow_runs(workspace: Workspace):
    client = MlflowClient(f"sqlite:///{workspace.folder}/{MLFLOW_DATABASE}")
    return client, client.search_runs([client.get_experiment_by_name("roll").experiment_id])


def statuses(workspace: Workspace) -> list[str]:
    return [run.info.status for run in mlflow_runs(workspace)[1]]


def test_ctrl_c_leaves_a_resumable_run_says_how_and_the_rest_is_the_same_run_in_mlflow(workspace, tracked):
    tracked(workspace)
    endless = settings(*REHEARSED, TRACKED, "iterations=200")
    process = workspace.start("run", str(workspace.config), *endless)
    workspace.wait_for_iteration(2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    assert "roll resume tiny-1" in output
    assert "Traceback" not in output
    assert "resumable" in workspace.printed("runs")
    before = workspace.chain()

    second = workspace.start("resume", "tiny-1")
    workspace.wait_for_iteration(before[-1].iteration + 2)
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=180)
    after = workspace.chain()
    assert after[: len(before)] == before
    assert [m.iteration for m in after] == list(range(len(after)))
    assert {m.leg for m in after} == {1, 2}

    def steps() -> set[int]:
        client, (run,) = mlflow_runs(workspace)
        return {point.step for point in client.get_metric_history(run.info.run_id, "reward/mean")}

    wait_until(lambda: steps() == set(range(1, len(after))), "MLflow has every iteration of all legs")
    wait_until(lambda: statuses(workspace) != ["RUNNING"], "MLflow shows that the run was stopped")


def test_a_run_whose_uncommitted_rollouts_became_garbage_generates_them_again(workspace):
    """A trainer that dies in an update leaves rollouts that no manifest names, and a cached result that names them."""
    run = workspace.open(*REHEARSED, "iterations=12", "checkpoint.every=9", "training.seconds_per_token=0.005")
    with workspace.when_committed(4, lambda: workspace.kill("trainer rank 0")):
        killed = workspace.run_leg(run)
    assert killed.ending is LegEnding.FAILED
    assert "trainer rank 0 died" in killed.cause
    before = workspace.chain()
    assert 4 <= before[-1].iteration < 12

    assert "removed" in workspace.printed("gc", "--older-than", "0")
    stopped = workspace.run_leg(run, leg=2)
    assert stopped.ending is LegEnding.FAILED
    assert "is missing" in stopped.cause
    assert workspace.run_leg(run, leg=3).ending is LegEnding.FINISHED
    after = workspace.chain()
    assert after[: len(before)] == before
    assert [m.iteration for m in after] == list(range(13))
    for manifest in after:
        for artifact in manifest.artifacts:
            workspace.store.get(artifact)
