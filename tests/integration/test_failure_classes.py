"""Failures by class, in real runs: nothing is generated twice, and what cannot pass stops the run with its cause."""

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT


def roll_with(workspace, fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command with faulty roles, to its end; stdout and stderr together."""
    return subprocess.run(
        [sys.executable, "-m", "tests.integration.faulty_roles", fault, *arguments],
        cwd=workspace.folder,
        env=workspace.environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def generated(workspace) -> list[str]:
    """Seeds of the attempts made so far; the file begins anew."""
    file = workspace.folder / "generated.txt"
    seeds = file.read_text().split()
    file.unlink()
    return seeds


def rollouts(workspace, run_id: str) -> list[str]:
    return [m.collected.trajectories.digest for m in workspace.chain(run_id) if m.collected]


def test_trajectories_wait_for_a_reward_service_that_is_back_a_leg_later(workspace):
    run = ["run", str(workspace.config), "--set", "retries={repeats: 1, first_delay_seconds: 0.01}"]
    unbroken = roll_with(workspace, "none", *run)
    assert unbroken.returncode == 0, unbroken.stdout
    seeds = generated(workspace)
    assert len(set(seeds)) == 3 * 16

    broken = roll_with(workspace, "AbsentReward", *run)

    assert broken.returncode == 0, broken.stdout
    assert [m.leg for m in workspace.chain("tiny-2")] == [1, 1, 2, 2]
    assert sorted(generated(workspace)) == sorted(seeds), "an attempt was made twice"
    assert rollouts(workspace, "tiny-2") == rollouts(workspace, "tiny-1")
    assert list((workspace.folder / "roll-data/work/tiny-2/unfinished").iterdir()) == []


def test_an_update_that_fails_twice_in_the_same_way_stops_the_run_and_its_rollout_is_used_later(workspace):
    stopped = roll_with(workspace, "FailingTrainer", "run", str(workspace.config), "--set", "legs.max_failures=9")
    assert stopped.returncode == 1, stopped.stdout
    says = "tiny-1 stopped at iteration 1: two legs in a row failed in the same way: ValueError: loss is not finite (log: "
    assert f"roll: {says}" in stopped.stdout
    assert "Traceback" not in stopped.stdout
    log = Path(stopped.stdout.partition(says)[2].partition(")")[0])
    assert "Traceback" in log.read_text()

    resumed = roll_with(workspace, "none", "resume", "tiny-1")

    assert resumed.returncode == 0, resumed.stdout
    assert [m.iteration for m in workspace.chain()] == [0, 1, 2, 3]
    seeds = generated(workspace)
    assert len(seeds) == len(set(seeds)) == 3 * 16
