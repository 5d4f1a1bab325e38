"""Runs that are killed several times, or have a second leg, end equal to an unbroken run, to the bit.

The short form of `make chaos`, which kills every process at every stage.
"""

import os
import signal
import subprocess

import pytest

from tests.chaos.outcomes import differences
from tests.integration.conftest import Workspace

LONG_S = 580.0
"""Deadline in seconds: half a dozen legs one after the other, on a machine with other work."""
ADAPTIVE_PPO = (
    "algorithm={kind: ppo, critic: {optimizer: {learning_rate: 1.0e-3}, warmup_iterations: 2}, "
    "shaping: {kl: {adaptive: {target: 0.1, horizon: 100}}, normalize: {mean: running, std: running}}}"
)
"""Algorithm with the most state to restore: a critic, running moments and an adaptive KL coefficient."""
SETTINGS = [
    *("--set", "iterations=8"),
    *("--set", "checkpoint.every=4"),
    *("--set", "legs.max_failures=0"),
    *("--set", ADAPTIVE_PPO),
]
SEED = "45"
"""Seed for which all four kills are in one run, and those that end a leg come some iterations after a checkpoint."""


@pytest.fixture(scope="module")
def chaos(new_workspace) -> tuple[Workspace, subprocess.CompletedProcess[str]]:
    """An unbroken run, tiny-1, and a broken one, tiny-2: an engine is killed in update_critic 1, the leg in collect 3, the
    flow in the recovery from that, and the trainer in prepare 7."""
    workspace = new_workspace("chaos")
    arguments = [*SETTINGS, "--kills", "4", "--per-run", "4", "--seed", SEED]
    return workspace, workspace.run_module("tests.chaos", "--config", str(workspace.config), *arguments, deadline_s=LONG_S)


def test_a_run_killed_four_times_ends_as_if_it_never_had_been(chaos):
    workspace, done = chaos
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == (
        "4 kill points tried in 1 runs, 1 survived, 0 missed; 0 differences, 0 committed iterations lost, 0 generated again"
    )
    chain = workspace.chain("tiny-2")
    assert [manifest.leg for manifest in chain] == [1, 1, 1, *[2] * 4, *[3] * 2], "the engine alone was survived"
    assert {"reward/kl_coefficient", "critic/value"} <= chain[-1].metrics.keys()


def test_of_two_legs_of_a_run_one_proceeds(chaos):
    """The first leg is paused, like a machine that is cut off, and continues after another leg has finished the run."""
    workspace, _ = chaos
    first = workspace.start("run", str(workspace.config), "--set", "name=pair", *SETTINGS)
    workspace.wait_for_iteration(1, "pair-1")
    leg = workspace.pid_of("leg", run_id="pair-1")
    os.kill(leg, signal.SIGSTOP)
    try:
        before = workspace.chain("pair-1")
        assert before[-1].iteration < 7, "the leg was over before it could be paused"

        refused = workspace.roll("resume", "pair-1")
        assert refused.returncode == 1
        assert "another leg of pair-1 is alive on this machine: wait for it, or stop it, then resume" in refused.stdout
        assert workspace.chain("pair-1") == before

        # Another machine would not see the lease of this one: only conditional commits keep the two legs apart.
        (workspace.folder / "roll-data/work/pair-1/lease").unlink()
        second = workspace.roll("resume", "pair-1")
        assert second.returncode == 0, second.stdout
    finally:
        os.kill(leg, signal.SIGCONT)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 1
    assert "was committed by another leg: this leg stops, nothing of it was mixed in" in output
    chain = workspace.chain("pair-1")
    assert [manifest.leg for manifest in chain] == [1] * len(before) + [2] * (9 - len(before))
    assert differences(workspace.chain("tiny-1"), chain) == ()
