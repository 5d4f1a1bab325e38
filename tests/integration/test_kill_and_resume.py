"""A run that is killed or stopped says how to go on, and does, as one run for whoever watches. The bits: `test_chaos.py`."""

import os
import signal

from mlflow import MlflowClient

from tests.integration.conftest import REHEARSED, wait_until


def committed_runs(workspace):
    client = MlflowClient(workspace.tracking)
    return client, client.search_runs([client.get_experiment_by_name("roll").experiment_id])


def statuses(workspace) -> list[str]:
    return [run.info.status for run in committed_runs(workspace)[1]]


def test_a_killed_run_says_how_to_resume_and_finishes_as_one_run_though_its_last_rollouts_became_garbage(
    workspace,
):
    """A trainer that dies leaves a collected iteration behind that no manifest names, and a kept answer that names it."""
    settings = (*REHEARSED, "--set", "iterations=12", "--set", "checkpoint.every=9", "--set", "legs.max_failures=0")
    process = workspace.start("run", str(workspace.config), *settings)
    workspace.wait_for_iteration(4)
    os.kill(workspace.pid_of("trainer rank 0"), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    before = workspace.chain()
    assert 4 <= before[-1].iteration < 12, "the run was over before it could be killed"
    assert process.returncode == 1
    assert "trainer rank 0 died" in output, output
    assert "roll resume tiny-1" in output
    assert len([line for line in output.splitlines() if line.startswith("roll: ")]) == 1
    assert "Traceback" not in output
    wait_until(lambda: statuses(workspace) == ["FAILED"], "MLflow shows the run as failed", 60.0)

    assert "removed" in workspace.roll("gc", "--older-than", "0").stdout
    stopped = workspace.roll("resume", "tiny-1")
    assert stopped.returncode == 1
    assert "is missing" in stopped.stdout
    resumed = workspace.roll("resume", "tiny-1")

    assert resumed.returncode == 0, resumed.stdout
    after = workspace.chain()
    assert after[: len(before)] == before
    assert [m.iteration for m in after] == list(range(13))
    assert {m.leg for m in after} == {1, 2}
    for manifest in after:
        for artifact in manifest.artifacts:
            workspace.store.get(artifact)
    assert statuses(workspace) == ["FINISHED"]
    client, runs = committed_runs(workspace)
    history = client.get_metric_history(runs[0].info.run_id, "reward/mean")
    assert sorted({point.step for point in history}) == list(range(1, 13))


def test_ctrl_c_leaves_a_resumable_run_and_says_how(workspace):
    process = workspace.start("run", str(workspace.config), *REHEARSED, "--set", "iterations=200")
    workspace.wait_for_iteration(2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    assert "roll resume tiny-1" in output
    assert "Traceback" not in output
    assert "resumable" in workspace.roll("runs").stdout
