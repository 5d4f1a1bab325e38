"""Broken on purpose: what comes out of a run after kills, or beside a second leg, is what an unbroken run gives, to the bit.

The short form of `make chaos`, which kills everybody everywhere.
"""

import os
import signal
import subprocess

import pytest

from roll_core.reporting.chaos import differences
from tests.integration.conftest import Workspace

LONG_S = 580.0
"""Half a dozen legs one after the other, on a machine that others use too."""
SETTINGS = ["--set", "checkpoint.every=4", "--set", "legs.max_failures=0"]
ADAPTIVE_PPO = (
    "algorithm={kind: ppo, critic: {optimizer: {learning_rate: 1.0e-3}, warmup_iterations: 2}, "
    "shaping: {kl: {adaptive: {target: 0.1, horizon: 100}}, normalize: {mean: running, std: running}}}"
)


@pytest.fixture(scope="module")
def chaos(tmp_path_factory, prefect_home) -> tuple[Workspace, subprocess.CompletedProcess[str]]:
    """tiny-1 is an unbroken run of ten iterations; in tiny-2 a trainer rank is killed in a prepare, an engine in an update,
    the flow in a recovery and the leg in a collect."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "RAY_"))}
    environment |= {"PREFECT_HOME": str(prefect_home), "COLUMNS": "160"}
    workspace = Workspace(tmp_path_factory.mktemp("chaos"), environment)
    settings = ["--set", "iterations=10", *SETTINGS, "--kills", "4", "--per-run", "4"]
    return workspace, workspace.roll("chaos", str(workspace.config), *settings, deadline_s=LONG_S)


def test_a_run_killed_four_times_ends_as_if_it_never_had_been(chaos):
    workspace, done = chaos
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == (
        "4 kill points tried in 1 runs, 0 missed; 0 differences, 0 committed iterations lost, 0 generated again"
    )
    assert len({manifest.leg for manifest in workspace.chain("tiny-2")}) > 1


def test_what_an_algorithm_remembers_survives_a_kill(workspace):
    """A critic, running moments and an adaptive KL: a leg killed in collect 5 loads checkpoint 3 and replays iteration 4."""
    settings = ["--set", "name=ppo", "--set", "iterations=6", "--set", "checkpoint.every=3", "--set", ADAPTIVE_PPO]
    done = workspace.roll(
        "chaos", str(workspace.config), *settings, "--kills", "2", "--per-run", "2", "--seed", "1", deadline_s=LONG_S
    )
    assert done.returncode == 0, done.stdout
    assert "reward/kl_coefficient" in workspace.chain("ppo-2")[-1].metrics
    assert "critic/value" in workspace.chain("ppo-2")[-1].metrics


def test_of_two_legs_of_a_run_one_proceeds(chaos):
    """The first leg is paused, as a machine that is cut off, and wakes up when another has carried the run on."""
    workspace, _ = chaos
    first = workspace.start("run", str(workspace.config), "--set", "name=pair", "--set", "iterations=10", *SETTINGS)
    workspace.wait_for_iteration(1, "pair-1")
    leg = workspace.pid_of("leg", run_id="pair-1")
    os.kill(leg, signal.SIGSTOP)
    try:
        before = workspace.chain("pair-1")
        assert before[-1].iteration < 9, "the leg was over before it could be paused"

        refused = workspace.roll("resume", "pair-1")
        assert refused.returncode == 1
        assert "another leg of pair-1 is alive on this machine: wait for it, or stop it, then resume" in refused.stdout
        assert workspace.chain("pair-1") == before

        # A machine that does not see the lock of this one: now the commits alone keep the two apart.
        (workspace.folder / "roll-data/work/pair-1/lease").unlink()
        second = workspace.roll("resume", "pair-1")
        assert second.returncode == 0, second.stdout
    finally:
        os.kill(leg, signal.SIGCONT)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 1
    assert "was committed by another leg: this leg stops, nothing of it was mixed in" in output
    chain = workspace.chain("pair-1")
    assert [manifest.leg for manifest in chain] == [1] * len(before) + [2] * (11 - len(before))
    assert differences(workspace.chain("tiny-1"), chain) == ()
