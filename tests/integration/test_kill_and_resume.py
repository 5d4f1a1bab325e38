"""Kill -9 in the middle of an iteration, resume, finish: what was committed stays, and nothing is done twice."""

import os
import signal

import pytest
from mlflow import MlflowClient

from tests.integration.conftest import wait_until


def committed_runs(workspace):
    client = MlflowClient(f"sqlite:///{workspace.folder}/roll-data/mlflow.db")
    return client, client.search_runs([client.get_experiment_by_name("roll").experiment_id])


def statuses(workspace) -> list[str]:
    return [run.info.status for run in committed_runs(workspace)[1]]


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("victim", ["flow", "trainer rank 0", "engine 0"])
def test_a_killed_run_resumes_from_its_last_commit_and_finishes(workspace, victim):
    process = workspace.start(
        "run", str(workspace.config), "--set", "iterations=40", "--set", "checkpoint.every=9", "--set", "legs.max_failures=0"
    )
    workspace.wait_for_iteration(4)
    leg = workspace.pid_of("leg")
    os.kill(process.pid if victim == "flow" else workspace.pid_of(victim), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    wait_until(lambda: gone(leg), "the killed run's leg is gone")
    before = workspace.chain()
    assert 4 <= before[-1].iteration < 40, "the run was over before it could be killed"
    if victim != "flow":
        assert process.returncode == 1
        assert f"{victim} died" in output, output
        assert "roll resume tiny-1" in output
        assert len([line for line in output.splitlines() if line.startswith("roll: ")]) == 1
        assert "Traceback" not in output
        wait_until(lambda: statuses(workspace) == ["FAILED"], "MLflow shows the run as failed", 60.0)

    resumed = workspace.roll("resume", "tiny-1")

    assert resumed.returncode == 0, resumed.stdout
    after = workspace.chain()
    assert after[: len(before)] == before
    assert [m.iteration for m in after] == list(range(41))
    assert {m.leg for m in after} == {1, 2}
    assert statuses(workspace) == ["FINISHED"]
    client, runs = committed_runs(workspace)
    history = client.get_metric_history(runs[0].info.run_id, "reward/mean")
    assert sorted({point.step for point in history}) == list(range(1, 41))


def test_a_run_survives_a_lost_trainer_by_itself(workspace):
    process = workspace.start("run", str(workspace.config), "--set", "iterations=40")
    workspace.wait_for_iteration(3)
    os.kill(workspace.pid_of("trainer rank 0"), signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert {m.leg for m in workspace.chain()} == {1, 2}
    assert workspace.chain()[-1].iteration == 40


ADAPTIVE_PPO = (
    "algorithm={kind: ppo, critic: {optimizer: {learning_rate: 1.0e-3}, warmup_iterations: 2}, "
    "shaping: {kl: {adaptive: {target: 0.1, horizon: 100}}, normalize: {mean: running, std: running}}}"
)


@pytest.mark.parametrize(
    ("algorithm", "checkpoint_every"),
    [("algorithm={kind: grpo}", 25), (ADAPTIVE_PPO, 3)],
    ids=["grpo, from the start", "ppo with critic, running moments and adaptive KL, from a checkpoint"],
)
def test_a_recovered_policy_is_the_one_that_was_lost(workspace, algorithm, checkpoint_every):
    """The next leg replays updates from stored rollouts; its next rollouts must equal those of a run that never broke."""
    settings = ["iterations=40", f"checkpoint.every={checkpoint_every}", "legs.max_failures=0", algorithm]
    settings = [part for setting in settings for part in ("--set", setting)]
    assert workspace.roll("run", str(workspace.config), *settings).returncode == 0
    process = workspace.start("run", str(workspace.config), *settings)
    workspace.wait_for_iteration(4, "tiny-2")
    os.kill(workspace.pid_of("trainer rank 0", run_id="tiny-2"), signal.SIGKILL)
    process.communicate(timeout=120)
    assert workspace.roll("resume", "tiny-2").returncode == 0
    unbroken, broken = workspace.chain("tiny-1"), workspace.chain("tiny-2")
    assert {m.leg for m in broken} == {1, 2}
    for name in ("reward/mean", "reward/kl_coefficient", "critic/value"):
        values = [[m.metrics.get(name) for m in chain] for chain in (unbroken, broken)]
        assert values[0] == values[1], name


def test_a_run_heals_whose_rollouts_were_collected_as_garbage_before_they_were_committed(workspace):
    """A trainer that dies leaves a collected iteration behind that no manifest names, and a kept answer that names it."""
    settings = ("--set", "iterations=12", "--set", "legs.max_failures=0")
    process = workspace.start("run", str(workspace.config), *settings)
    workspace.wait_for_iteration(4)
    os.kill(workspace.pid_of("trainer rank 0"), signal.SIGKILL)
    process.communicate(timeout=120)
    assert "removed" in workspace.roll("gc", "--older-than", "0").stdout
    stopped = workspace.roll("resume", "tiny-1")
    assert stopped.returncode == 1
    assert "is missing" in stopped.stdout
    resumed = workspace.roll("resume", "tiny-1")
    assert resumed.returncode == 0, resumed.stdout
    for manifest in workspace.chain():
        for artifact in manifest.artifacts:
            workspace.store.get(artifact)


def test_ctrl_c_leaves_a_resumable_run_and_says_how(workspace):
    process = workspace.start("run", str(workspace.config), "--set", "iterations=200")
    workspace.wait_for_iteration(2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "roll resume tiny-1" in output
    assert "Traceback" not in output
    assert "resumable" in workspace.roll("runs").stdout
