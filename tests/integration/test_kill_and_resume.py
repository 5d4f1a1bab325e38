"""A run that is killed or stopped says how to resume it, and finishes as one run in the store and in MLflow, equal to an
unbroken one to the bit.

Kills of roles: engines, reward workers and the scheduler in `test_async.py`, the trainer in `test_run_on_s3.py` and
`test_chaos.py`. A killed flow on SLURM: `test_slurm.py`.
"""

import os
import shutil
import signal

import pytest
from mlflow import MlflowClient

from roll_core.rollout.journal import Journal
from roll_core.store.records.runs import read_config
from roll_core.store.records.traces import decode_trace
from roll_core.types.leg import LegEnding
from tasks.services import SPOOL, run_dir
from tests.chaos.outcomes import differences
from tests.integration.conftest import MLFLOW_DATABASE, REHEARSED, TRACKED, Workspace, settings
from tests.support import patience, wait_until

LONG_ENOUGH = ("iterations=16", "checkpoint.every=5")
"""Settings of a run that does not end before it is killed twice and stopped."""


def mlflow_runs(workspace: Workspace):
    client = MlflowClient(f"sqlite:///{workspace.folder}/{MLFLOW_DATABASE}")
    return client, client.search_runs([client.get_experiment_by_name("roll").experiment_id])


def statuses(workspace: Workspace) -> list[str]:
    return [run.info.status for run in mlflow_runs(workspace)[1]]


def test_a_run_whose_leg_and_ray_are_killed_and_that_is_stopped_and_resumed_ends_as_an_unbroken_one(workspace, tracked):
    """The flow launches another leg after each kill. Ctrl-C stops flow and leg; `roll resume` starts both again."""
    tracked(workspace)
    unbroken = workspace.train(*REHEARSED, "name=unbroken", *LONG_ENOUGH)
    broken = settings(*REHEARSED, TRACKED, *LONG_ENOUGH, "inference.seconds_per_token=0.3", "legs.max_failures=2")
    process = workspace.start("run", str(workspace.config), *broken)
    workspace.wait_for_iteration(2)
    workspace.kill("leg")
    workspace.wait_until(lambda: workspace.chain()[-1].leg == 2, "leg 2 commits an iteration", 180.0)
    workspace.kill("ray node", leg=2)
    workspace.wait_until(lambda: workspace.chain()[-1].leg == 3, "leg 3 commits an iteration", 180.0)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=patience(180))
    assert process.returncode == 130, output
    assert "roll resume tiny-1" in output
    assert "Traceback" not in output
    assert "resumable" in workspace.roll("runs").stdout
    flow, killed_leg, *_, stopped_leg = workspace.flow_states()
    assert {flow, killed_leg, stopped_leg} <= {"Crashed", "Cancelled"}, "after the next look"
    before = workspace.chain()
    assert before[-1].iteration < unbroken[-1].iteration

    resumed = workspace.roll("resume", "tiny-1")
    assert resumed.returncode == 0, resumed.stdout
    after = workspace.chain()
    assert after[: len(before)] == before
    assert {m.leg for m in after} == {1, 2, 3, 4}
    assert differences(unbroken, after) == ()

    def steps() -> set[int]:
        client, (run,) = mlflow_runs(workspace)
        return {point.step for point in client.get_metric_history(run.info.run_id, "reward/mean")}

    wait_until(lambda: steps() == set(range(1, len(after))), "MLflow has every iteration of all legs")
    wait_until(lambda: statuses(workspace) == ["FINISHED"], "MLflow shows that the run finished")


@pytest.mark.exhaustive
def test_a_run_whose_uncommitted_rollouts_became_garbage_generates_them_again(workspace):
    """A trainer that dies in an update leaves rollouts that no manifest names, and a cached result that names them. They are
    in the spool, too, which is deleted here as if the next leg had another disk."""
    run = workspace.open(*REHEARSED, "iterations=8", "checkpoint.every=9", "training.seconds_per_token=0.005")
    with workspace.when_committed(3, lambda: workspace.kill("trainer rank 0")):
        killed = workspace.run_leg(run)
    assert killed.ending is LegEnding.FAILED
    assert "trainer rank 0 died" in killed.cause
    before = workspace.chain()
    assert 3 <= before[-1].iteration < 8

    assert "removed" in workspace.printed("gc", "--older-than", "0")
    shutil.rmtree(run_dir(run, read_config(run)) / SPOOL)
    stopped = workspace.run_leg(run, leg=2)
    assert stopped.ending is LegEnding.FAILED
    assert "is missing" in stopped.cause
    assert workspace.run_leg(run, leg=3).ending is LegEnding.FINISHED
    after = workspace.chain()
    assert after[: len(before)] == before
    assert [m.iteration for m in after] == list(range(9))
    for manifest in after:
        for artifact in manifest.artifacts:
            workspace.store.get(artifact)


def test_a_leg_that_is_told_to_stop_leaves_its_collect_and_the_next_leg_generates_only_the_rest(workspace):
    """SIGTERM amid a collect: what is finished is in the journal, and no engine generates it again."""
    several_rounds = (*REHEARSED, "iterations=4", "checkpoint.every=9", "rollout.slots_per_engine=4")
    unbroken = workspace.train(*several_rounds, "name=whole")
    run = workspace.open(*several_rounds, "inference.seconds_per_token=0.3", "store.unfinished_seconds=0.1")
    journal = Journal(workspace.store, run.run_id, 0.1)

    def stop_the_second_collect() -> None:
        wait_until(lambda: any(group >= 4 for group, _ in journal.read()), "part of iteration 2 is generated")
        os.kill(os.getpid(), signal.SIGTERM)

    with workspace.when_committed(1, stop_the_second_collect):
        stopped = workspace.run_leg(run)
    assert (stopped.ending, stopped.last_iteration) == (LegEnding.PREEMPTED, 1)
    assert [checkpoint.iteration for checkpoint in workspace.checkpoints()] == [0, 1]
    kept = journal.read()
    assert 0 < len(kept) < 16

    assert workspace.run_leg(run, leg=2).ending is LegEnding.FINISHED
    after = workspace.chain()
    assert differences(unbroken, after) == ()
    assert after[2].collected is not None
    trace = decode_trace(workspace.store.get(after[2].collected.trace))
    generated_again = {(each.problem, each.attempt) for each in trace if any(span.engine for span in each.spans)}
    assert generated_again.isdisjoint(kept)
    assert len(generated_again) + len(kept) == 16


@pytest.mark.exhaustive
def test_a_leg_that_is_told_to_stop_skips_an_evaluation_and_the_next_leg_makes_it(workspace):
    """The iteration is not committed without its evaluation: the next leg takes its rollouts from the stage cache."""
    unbroken = workspace.train(*REHEARSED, "name=whole", "iterations=4", "evaluation.every=2")
    run = workspace.open(*REHEARSED, "iterations=4", "evaluation.every=2", "training.seconds_per_token=0.01")
    stages = workspace.folder / "roll-data/work/tiny-1/leg-1/stages.jsonl"

    def stop_in_the_update() -> None:
        wait_until(lambda: '"update 2"' in stages.read_text(), "the update of iteration 2 begins")
        os.kill(os.getpid(), signal.SIGUSR2)

    with workspace.when_committed(1, stop_in_the_update):
        stopped = workspace.run_leg(run)
    assert (stopped.ending, stopped.last_iteration) == (LegEnding.WALLTIME, 1)
    assert [checkpoint.iteration for checkpoint in workspace.checkpoints()] == [0], "another policy was checkpointed as 1"
    assert workspace.run_leg(run, leg=2).ending is LegEnding.FINISHED
    after = workspace.chain()
    assert differences(unbroken, after) == ()
    assert '"collect 2"' not in (stages.parent.parent / "leg-2/stages.jsonl").read_text(), "iteration 2 was collected again"
