"""Runs that are killed several times, or have a second leg, end equal to an unbroken run, to the bit.

The short form of `make chaos`, which kills every process at every stage.
"""

import os
import re
import signal

import pytest

from roll_core.types.leg import LegEnding
from tests.chaos.kill_points import VICTIMS
from tests.chaos.outcomes import differences
from tests.integration.conftest import REHEARSED, settings
from tests.support import patience

LONG_S = 580.0
"""Deadline in seconds: half a dozen legs one after the other."""
REHEARSAL = (*REHEARSED, f"iterations={2 * len(VICTIMS) + 2}", "checkpoint.every=4", "legs.max_failures=9")
PAIR = (*REHEARSED, "iterations=8", "checkpoint.every=4", "legs.max_failures=0")
ADAPTIVE_PPO = (
    "algorithm={kind: ppo, critic: {optimizer: {learning_rate: 1.0e-3}, warmup_iterations: 2}, "
    "shaping: {kl: {adaptive: {target: 0.1, horizon: 100}}, normalize: {mean: running, std: running}}}"
)
"""Algorithm with the most state to restore: a critic, running moments and an adaptive KL coefficient."""


@pytest.mark.exhaustive
def test_a_run_in_which_every_kind_of_process_is_killed_ends_as_if_none_had_been(workspace):
    kills = str(len(VICTIMS))
    arguments = ("--config", str(workspace.config), *settings(*REHEARSAL), "--kills", kills, "--per-run", kills)
    done = workspace.run_module("tests.chaos", *arguments, deadline_s=LONG_S)
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(
        rf"{kills} kill points tried in 1 runs, \d survived, 0 missed; "
        "0 differences, 0 committed iterations lost, 0 generated again",
        done.stdout.splitlines()[-1],
    ), done.stdout
    assert all(f"| {victim} |" in done.stdout for victim in VICTIMS), done.stdout


@pytest.mark.exhaustive
def test_of_two_legs_of_a_run_one_proceeds(workspace):
    """The first leg is paused, like a machine that is cut off, and continues after another leg has finished the run."""
    unbroken = workspace.train(*PAIR)
    first = workspace.start("run", str(workspace.config), *settings(*PAIR, "name=pair", "inference.seconds_per_token=0.2"))
    workspace.wait_for_iteration(1, "pair-1")
    leg = workspace.pid_of("leg", run_id="pair-1")
    os.kill(leg, signal.SIGSTOP)
    try:
        before = workspace.chain("pair-1")
        assert before[-1].iteration < len(unbroken) - 2, "the leg was over before it could be paused"
        run = workspace.find("pair-1")
        refused = workspace.run_leg(run, leg=2)
        assert refused.ending is LegEnding.FENCED
        assert "another leg of pair-1 is alive on this machine: wait for it, or stop it, then resume" in refused.cause
        assert workspace.chain("pair-1") == before

        # Another machine would not see the lease of this one: only conditional commits keep the two legs apart.
        (workspace.folder / "roll-data/work/pair-1/lease").unlink()
        assert workspace.run_leg(run, leg=2).ending is LegEnding.FINISHED
    finally:
        os.kill(leg, signal.SIGCONT)
    output, _ = first.communicate(timeout=patience(120))
    assert first.returncode == 1
    assert "was committed by another leg: this leg stops, nothing of it was mixed in" in output
    chain = workspace.chain("pair-1")
    assert [manifest.leg for manifest in chain] == [1] * len(before) + [2] * (len(unbroken) - len(before))
    assert differences(unbroken, chain) == ()


def test_a_learner_with_a_critic_and_adaptive_coefficients_is_restored_to_the_bit(workspace):
    """The trainer is killed some iterations after a checkpoint: the updates since are replayed from stored rollouts."""
    overrides = ("iterations=5", "checkpoint.every=2", ADAPTIVE_PPO)
    unbroken = workspace.train(*overrides)
    run = workspace.open(*overrides)
    with workspace.when_committed(3, lambda: workspace.kill("trainer rank 0", run_id="tiny-2"), "tiny-2"):
        assert workspace.run_leg(run).ending is LegEnding.FAILED
    assert workspace.run_leg(run, leg=2).ending is LegEnding.FINISHED
    chain = workspace.chain("tiny-2")
    assert {manifest.leg for manifest in chain} == {1, 2}
    assert {"reward/kl_coefficient", "critic/value"} <= chain[-1].metrics.keys()
    assert differences(unbroken, chain) == ()
