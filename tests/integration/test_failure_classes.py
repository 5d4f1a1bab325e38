"""Failures by class, in real runs: who died is replaced, nothing finished is generated twice, and what cannot pass stops a
run with its cause."""

from collections import Counter
from pathlib import Path

import pytest

from tests.integration.conftest import REHEARSED, Workspace

TWO_ENGINES = [
    *("--set", "cluster={devices_per_node: 3, threads_per_device: 1}"),
    *("--set", "placement={trainer: [0], engines: 1-2}"),
    *("--set", "retries={repeats: 1, first_delay_seconds: 0.01}"),
]


@pytest.fixture(scope="module")
def unbroken(new_workspace) -> tuple[Workspace, list[str]]:
    """tiny-1, which nothing happened to, and the seeds of its attempts."""
    workspace = new_workspace("unbroken")
    done = workspace.roll_with("none", "run", str(workspace.config), *TWO_ENGINES)
    assert done.returncode == 0, done.stdout
    return workspace, workspace.seeds_generated()


def rollouts(workspace: Workspace, run_id: str) -> list[str]:
    return [m.collected.trajectories.digest for m in workspace.chain(run_id) if m.collected]


def test_a_killed_engine_is_replaced_and_trajectories_wait_for_a_reward_service_that_is_back_a_leg_later(unbroken):
    """An engine dies in collect 2, which the other one finishes; its successor takes part in collect 3, which fails for want
    of rewards. What comes out are the very rollouts of the unbroken run."""
    workspace, seeds = unbroken
    assert len(set(seeds)) == 3 * 16

    broken = workspace.roll_with("DyingEngine,AbsentReward", "run", str(workspace.config), *TWO_ENGINES)

    assert broken.returncode == 0, broken.stdout
    assert [m.leg for m in workspace.chain("tiny-2")] == [1, 1, 1, 2]
    assert rollouts(workspace, "tiny-2") == rollouts(workspace, "tiny-1")
    made = Counter(workspace.seeds_generated())
    assert set(made) == set(seeds)
    assert made.total() - len(made) == 8, "all that the dead engine had, and nothing else, is made again"


def test_an_update_that_fails_twice_in_the_same_way_stops_the_run_and_its_rollout_is_used_later(workspace):
    settings = (*REHEARSED, "--set", "legs.max_failures=9")
    stopped = workspace.roll_with("FailingTrainer", "run", str(workspace.config), *settings)
    assert stopped.returncode == 1, stopped.stdout
    says = "tiny-1 stopped at iteration 1: two legs in a row failed in the same way: ValueError: loss is not finite (log: "
    assert f"roll: {says}" in stopped.stdout
    assert "Traceback" not in stopped.stdout
    log = Path(stopped.stdout.partition(says)[2].partition(")")[0])
    assert "Traceback" in log.read_text()

    resumed = workspace.roll_with("none", "resume", "tiny-1")

    assert resumed.returncode == 0, resumed.stdout
    assert [m.iteration for m in workspace.chain()] == [0, 1, 2, 3]
    seeds = workspace.seeds_generated()
    assert len(seeds) == len(set(seeds)) == 3 * 16
