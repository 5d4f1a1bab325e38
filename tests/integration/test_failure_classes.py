"""Failures by class, in real runs: a dead role is replaced, nothing finished is generated twice, and a deterministic failure
stops the run with its cause."""

import re
from collections import Counter
from pathlib import Path

import pytest

from flows.rlvr import reason_to_stop
from roll_core.config.operations.legs import LegsConfig
from roll_core.errors import FailureClass
from roll_core.roles.process import node_name
from roll_core.store.records.nodes import read_failures
from roll_core.types.leg import LegEnding
from tests.integration.conftest import REHEARSED, Workspace
from tests.integration.faulty_roles import AbsentReward, BrokenGpuTrainer, DyingEngine, FailingTrainer, RecordingEngine, use

TWO_ENGINES = (
    *REHEARSED,
    "cluster={devices_per_node: 3, threads_per_device: 1}",
    "placement={trainer: [0], engines: 1-2}",
    "retries={repeats: 1, first_delay_seconds: 0.01}",
)


def rollouts(workspace: Workspace, run_id: str) -> list[str]:
    return [m.collected.trajectories.digest for m in workspace.chain(run_id) if m.collected]


def test_a_killed_engine_is_replaced_and_trajectories_wait_for_a_reward_service_that_is_back_a_leg_later(workspace):
    """An engine dies in collect 2, which the other one finishes. Its replacement takes part in collect 3, which fails
    without rewards. The rollouts that come out are those of an unbroken run."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, RecordingEngine)
        workspace.train(*TWO_ENGINES)
    seeds = workspace.seeds_generated()
    assert len(set(seeds)) == 3 * 16

    broken = workspace.open(*TWO_ENGINES)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, DyingEngine, AbsentReward)
        first = workspace.run_leg(broken)
    assert first.ending is LegEnding.FAILED
    assert "judge" in first.cause
    with pytest.MonkeyPatch.context() as patch:
        use(patch, RecordingEngine)
        assert workspace.run_leg(broken, leg=2).ending is LegEnding.FINISHED

    assert [m.leg for m in workspace.chain("tiny-2")] == [1, 1, 1, 2]
    assert rollouts(workspace, "tiny-2") == rollouts(workspace, "tiny-1")
    generated = Counter(workspace.seeds_generated())
    assert set(generated) == set(seeds)
    assert generated.total() - len(generated) == 8, "all that the dead engine had, and nothing else, is generated again"


def test_an_update_that_fails_twice_in_the_same_way_stops_the_run_and_its_rollout_is_used_later(workspace, capfd):
    run = workspace.open(*REHEARSED)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, RecordingEngine, FailingTrainer)
        endings = [workspace.run_leg(run, leg) for leg in (1, 2)]
    assert [(ended.ending, ended.last_iteration) for ended in endings] == [(LegEnding.FAILED, 1)] * 2
    assert endings[0].cause == "ValueError: loss is not finite", "the cause is one line"
    assert "Traceback" in capfd.readouterr().err, "the log has the rest"
    reason = reason_to_stop(endings, LegsConfig(max_failures=9))
    assert reason is not None
    assert "two legs in a row failed in the same way: ValueError: loss is not finite" in reason

    with pytest.MonkeyPatch.context() as patch:
        use(patch, RecordingEngine)
        assert workspace.run_leg(run, leg=3).ending is LegEnding.FINISHED
    assert [m.iteration for m in workspace.chain()] == [0, 1, 2, 3]
    seeds = workspace.seeds_generated()
    assert len(seeds) == len(set(seeds)) == 3 * 16
    assert Path(workspace.folder / "roll-data/work/tiny-1/leg-3").exists()


def test_a_gpu_that_breaks_during_an_update_is_named_and_counts_against_its_node(workspace):
    run = workspace.open(*REHEARSED)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, BrokenGpuTrainer)
        ended = workspace.run_leg(run)
    assert (ended.ending, ended.failure, ended.lost_nodes) == (LegEnding.FAILED, FailureClass.TRANSIENT, (node_name(),))
    assert re.fullmatch(f"node {node_name()}: GPU .* failed .*uncorrectable ECC error encountered.", ended.cause)
    [failure] = read_failures(workspace.store)[node_name()]
    assert (failure.run_id, failure.leg) == (run.run_id, 1)
