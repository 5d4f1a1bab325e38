"""Broken on purpose: what comes out of a run after kills, or beside a second leg, is what an unbroken run gives, to the bit.

The short form of `make chaos`, which kills everybody everywhere.
"""

import os
import signal

import pytest

from roll_core.reporting.chaos import differences
from tests.integration.conftest import Workspace, wait_until

SETTINGS = ["--set", "checkpoint.every=4", "--set", "legs.max_failures=0"]
ADAPTIVE_PPO = (
    "algorithm={kind: ppo, critic: {optimizer: {learning_rate: 1.0e-3}, warmup_iterations: 2}, "
    "shaping: {kl: {adaptive: {target: 0.1, horizon: 100}}, normalize: {mean: running, std: running}}}"
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, prefect_home) -> Workspace:
    """One for all: tiny-1 is the unbroken run of ten iterations."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "RAY_"))}
    return Workspace(tmp_path_factory.mktemp("chaos"), environment | {"PREFECT_HOME": str(prefect_home), "COLUMNS": "160"})


def test_a_run_killed_four_times_ends_as_if_it_never_had_been(workspace):
    """The flow in a recovery, the leg in a collect, a trainer rank in a prepare, an engine in an update."""
    done = workspace.roll(
        "chaos", str(workspace.config), "--set", "iterations=10", *SETTINGS, "--kills", "4", "--per-run", "4"
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == (
        "4 kill points tried in 1 runs, 0 missed; 0 differences, 0 committed iterations lost, 0 generated again"
    )
    assert len({manifest.leg for manifest in workspace.chain("tiny-2")}) > 1


def test_what_an_algorithm_remembers_survives_a_kill(workspace):
    """A critic, running moments and an adaptive KL, from a checkpoint and replayed updates."""
    settings = ["--set", "name=ppo", "--set", "iterations=6", "--set", "checkpoint.every=2", "--set", ADAPTIVE_PPO]
    done = workspace.roll("chaos", str(workspace.config), *settings, "--kills", "2", "--per-run", "2", "--seed", "1")
    assert done.returncode == 0, done.stdout
    assert "reward/kl_coefficient" in workspace.chain("ppo-2")[-1].metrics
    assert "critic/value" in workspace.chain("ppo-2")[-1].metrics


def test_of_two_legs_of_a_run_one_proceeds(workspace):
    first = workspace.start("run", str(workspace.config), "--set", "name=pair", "--set", "iterations=9999", *SETTINGS)
    workspace.wait_for_iteration(1, "pair-1")

    refused = workspace.roll("resume", "pair-1")
    assert refused.returncode == 1
    assert "another leg of pair-1 is alive on this machine: wait for it, or stop it, then resume" in refused.stdout
    assert first.poll() is None

    # A machine that does not see this one's lock: the commits alone keep the two apart.
    (workspace.folder / "roll-data/work/pair-1/lease").unlink()
    legs = {"first": first, "second": workspace.start("resume", "pair-1")}
    wait_until(lambda: any(leg.poll() is not None for leg in legs.values()), "one of two legs stops")
    [stopped] = [name for name, leg in legs.items() if leg.poll() is not None]
    loser, winner = legs.pop(stopped), *legs.values()
    assert loser.returncode == 1
    assert "was committed by another leg: this leg stops, nothing of it was mixed in" in loser.communicate()[0]
    reached = workspace.chain("pair-1")[-1].iteration
    workspace.wait_for_iteration(reached + 2, "pair-1")
    os.killpg(winner.pid, signal.SIGINT)
    winner.communicate(timeout=60)
    assert winner.returncode == 130

    assert differences(workspace.chain("tiny-1")[:10], workspace.chain("pair-1")[:10]) == ()
