"""Endings of legs: how they are read, whether another leg follows, and when a leg stops by itself."""

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from flows.rlvr import nodes_to_avoid, reason_to_stop
from infra.slurm.launcher import JobEnd, LegRequest
from infra.slurm.node import NodeReport
from infra.slurm.queue import FORGOTTEN, JobState
from infra.slurm.slurm import SlurmLauncher, read_end
from roll_core.config.operations.legs import LegsConfig, SlurmLauncherConfig
from roll_core.errors import ArtifactDamaged, DeviceFault, FailureClass, LegInterrupted, RoleDied
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import open_run, read_chain
from roll_core.types.leg import LegEnded, LegEnding
from roll_core.types.refs import RunRef
from tasks.leg_time import SHUTDOWN_S, LegTime, p95
from tasks.legs import leg_failed, read_ending
from tasks.services import _lease, record_node_failures, run_dir
from tests.support import tiny_config


def ended(ending: LegEnding, last_iteration: int = 3, failure: FailureClass | None = None) -> LegEnded:
    return LegEnded(run_id="tiny-1", leg=1, ending=ending, last_iteration=last_iteration, cause="why", failure=failure)


# -------------------------------------------------------------------------------------------------- read from SLURM
@pytest.mark.parametrize(
    ("state", "ending"),
    [
        ("TIMEOUT", LegEnding.WALLTIME),
        ("PREEMPTED", LegEnding.PREEMPTED),
        ("NODE_FAIL", LegEnding.NODE_FAIL),
        ("OUT_OF_MEMORY", LegEnding.OUT_OF_MEMORY),
        ("CANCELLED", LegEnding.CANCELLED),
        ("FAILED", None),
        ("COMPLETED", None),
    ],
)
def test_a_job_without_a_report_ended_as_slurm_says(state, ending):
    end = read_end(JobState(state), None)
    assert (end.ending, end.result) == (ending, None)
    assert state in end.cause


def test_the_cause_of_a_leg_with_a_result_is_the_state_that_slurm_reports():
    end = read_end(JobState("CANCELLED", nodes="n[1-2]"), NodeReport("result"))
    assert (end.cause, end.nodes) == ("SLURM says CANCELLED", "n[1-2]")


def test_a_job_that_slurm_has_forgotten_failed():
    assert read_end(FORGOTTEN, None).ending is None


def test_a_job_whose_nodes_lost_ray_ended_by_node_failure():
    end = read_end(JobState("COMPLETED"), NodeReport(None, "the head of Ray on n1 ended with -9", lost_nodes=("n1",)))
    assert (end.ending, end.lost_nodes) == (LegEnding.NODE_FAIL, ("n1",))


def test_a_leg_that_was_signalled_and_left_no_result_was_preempted():
    assert read_end(JobState("FAILED"), NodeReport(None, "ended with -15", signalled=True)).ending is LegEnding.PREEMPTED


@pytest.mark.parametrize(
    ("state", "description"),
    [
        (JobState("PENDING", "Resources", submitted_at=0.0), "waits for 25 min (Resources)"),
        (JobState("PENDING", "Priority", starts_at=3600.0), "waits (Priority), expected to start in 35 min"),
        (JobState("RUNNING", nodes="n[1-2]", ends_at=2100.0), "runs on n[1-2], 10 min left"),
        (JobState("COMPLETING"), "is completing"),
    ],
)
def test_the_state_of_a_job_is_described_in_a_few_words(state, description):
    assert state.describe(now=1500.0) == description


# ------------------------------------------------------------------------------------------------ read from leg and launcher
@pytest.mark.parametrize(
    ("own", "seen", "read"),
    [
        (LegEnding.FINISHED, LegEnding.CANCELLED, LegEnding.FINISHED),
        (LegEnding.FENCED, LegEnding.NODE_FAIL, LegEnding.FENCED),
        (LegEnding.WALLTIME, None, LegEnding.WALLTIME),
        (LegEnding.PREEMPTED, LegEnding.WALLTIME, LegEnding.PREEMPTED),
        (LegEnding.PREEMPTED, LegEnding.CANCELLED, LegEnding.CANCELLED),
        (LegEnding.FAILED, None, LegEnding.FAILED),
        (LegEnding.FAILED, LegEnding.NODE_FAIL, LegEnding.NODE_FAIL),
        (LegEnding.FAILED, LegEnding.OUT_OF_MEMORY, LegEnding.OUT_OF_MEMORY),
    ],
)
def test_the_ending_that_a_leg_reports_counts_unless_the_launcher_knows_why_it_failed(tmp_path, own, seen, read):
    config = tiny_config(tmp_path)
    run = open_run(ObjectStore(config.store.uri), config)
    assert read_ending(JobEnd(seen, ended(own), ""), run, leg=1).ending is read


def test_the_ending_of_a_leg_without_a_result_has_the_last_committed_iteration(tmp_path):
    config = tiny_config(tmp_path)
    run = open_run(ObjectStore(config.store.uri), config)
    read = read_ending(JobEnd(LegEnding.NODE_FAIL, None, "n1 is gone", ("n1",)), run, leg=2)
    assert (read.ending, read.last_iteration, read.lost_nodes) == (LegEnding.NODE_FAIL, -1, ("n1",))
    assert read_ending(JobEnd(None, None, "died"), run, leg=2).ending is LegEnding.FAILED


def test_a_leg_that_was_told_to_stop_while_it_recovered_was_preempted(tmp_path):
    config = tiny_config(tmp_path)
    run = open_run(ObjectStore(config.store.uri), config)
    assert leg_failed(run, 1, LegInterrupted("prepare was left")).ending is LegEnding.PREEMPTED


# ----------------------------------------------------------------------------------------------- whether another leg follows
SLURM = LegsConfig(launcher=SlurmLauncherConfig(), max_failures=1, max_interruptions=2)


def test_a_cancelled_leg_is_the_last():
    assert "was cancelled" in (reason_to_stop([ended(LegEnding.CANCELLED)], SLURM) or "")


@pytest.mark.parametrize("legs", [SLURM, LegsConfig()], ids=["slurm", "local"])
def test_only_a_deterministic_failure_that_repeats_stops_a_run(legs):
    failed = ended(LegEnding.FAILED, failure=FailureClass.DETERMINISTIC)
    assert reason_to_stop([failed], legs) is None
    assert "two legs in a row failed in the same way: why" in (reason_to_stop([failed, failed], legs) or "")


@pytest.mark.parametrize("legs", [SLURM, LegsConfig()], ids=["slurm", "local"])
def test_a_mistake_of_the_user_gets_no_second_leg(legs):
    mistaken = ended(LegEnding.FAILED, failure=FailureClass.MISTAKE)
    assert "would fail in the same way: why" in (reason_to_stop([mistaken], legs) or "")


def test_the_leg_after_a_deterministic_failure_avoids_its_nodes_and_after_a_lost_node_that_one_alone():
    failed = ended(LegEnding.FAILED, failure=FailureClass.DETERMINISTIC).model_copy(update={"nodes": "n[1-2]"})
    assert nodes_to_avoid([]) == ()
    assert nodes_to_avoid([failed]) == ("n[1-2]",)
    assert nodes_to_avoid([failed, ended(LegEnding.PREEMPTED)]) == ()
    assert nodes_to_avoid([failed.model_copy(update={"failure": FailureClass.TRANSIENT})]) == ()
    assert nodes_to_avoid([failed.model_copy(update={"lost_nodes": ("n2",)})]) == ("n2",)


def slurm_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str) -> None:
    """Put stand-ins for `sinfo`, which lists these nodes, and for `scontrol`, which expands n[1-2], first in the PATH."""
    for name, lines in (("sinfo", nodes), ("scontrol", "n1\nn2")):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<EOF\n{lines}\nEOF\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("nodes", "options", "excluded"),
    [
        ("n1 gpu*\nn2 gpu*\nn3 gpu*\nn4 gpu*", {}, ("old", "n[1-2]")),
        ("n1 gpu*\nn2 gpu*\nn3 gpu*\nn4 other", {}, ("old",)),
        ("n1 gpu*\nn2 gpu*\nn3 gpu*\nn4 gpu*", {"constraint": "h100"}, ("old",)),
    ],
    ids=["enough others", "too few others", "the others may not do"],
)
def test_a_leg_avoids_nodes_only_if_the_partition_has_enough_others(tmp_path, monkeypatch, nodes, options, excluded):
    slurm_with(tmp_path, monkeypatch, nodes)
    request = LegRequest("run.leg-2", tmp_path, 2, 8, 8, 60, exclude=("old",), avoid=("n[1-2]",))
    assert SlurmLauncher(SlurmLauncherConfig(options=options))._excluded(request) == excluded


# ------------------------------------------------------------------------------------ broken GPUs, damaged or absent stores
def test_a_broken_gpu_is_a_failure_of_its_node_that_later_legs_avoid(tmp_path):
    config = tiny_config(tmp_path)
    run = open_run(ObjectStore(config.store.uri), config)
    fault = leg_failed(run, 1, DeviceFault({"n2": "GPU 3 failed (CUDA error: uncorrectable ECC error encountered)"}))
    assert (fault.ending, fault.failure, fault.lost_nodes) == (LegEnding.FAILED, FailureClass.TRANSIENT, ("n2",))
    assert fault.cause == "node n2: GPU 3 failed (CUDA error: uncorrectable ECC error encountered)"
    assert nodes_to_avoid([fault]) == ("n2",)


def test_a_damaged_manifest_does_not_replace_the_cause_of_a_leg(tmp_path):
    config = tiny_config(tmp_path)
    run = open_run(ObjectStore(config.store.uri), config)
    ObjectStore(config.store.uri).create(f"runs/{run.run_id}/iterations/00000000.json", b"not a manifest")
    with pytest.raises(ArtifactDamaged):
        read_chain(ObjectStore(config.store.uri), run.run_id)
    failed = leg_failed(run, 1, RoleDied("engine 0 died"))
    assert (failed.cause, failed.last_iteration) == ("engine 0 died", 0), "the listing suffices"


def test_a_store_that_is_away_does_not_fail_the_record_of_a_failed_node(tmp_path, caplog):
    (tmp_path / "store").touch()
    run = RunRef(run_id="tiny-1", store_uri=f"file://{tmp_path}/store", config_digest="")
    record_node_failures(run, 1, {"n1": "Ray ended"})
    assert "a failure of node n1 (Ray ended) is not recorded" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_does_not_stop_a_leg(tmp_path, monkeypatch, caplog, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    config = tiny_config(tmp_path)
    run = open_run(ObjectStore(config.store.uri), config)
    run_dir(run, config).mkdir(parents=True)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with _lease(run, config):
        assert "cannot be locked" in caplog.text


@pytest.mark.parametrize("ending", [LegEnding.PREEMPTED, LegEnding.NODE_FAIL])
def test_interruptions_have_a_budget_of_their_own(ending):
    assert reason_to_stop([ended(ending)] * 2, SLURM) is None
    assert "after 3 interrupted leg(s)" in (reason_to_stop([ended(LegEnding.PREEMPTED), *[ended(ending)] * 2], SLURM) or "")
    assert reason_to_stop([ended(ending, 1), ended(ending, 2), ended(ending, 3)], SLURM) is None


def test_on_one_machine_a_node_failure_counts_as_a_failed_leg():
    assert "after 1 failed leg(s)" in (reason_to_stop([ended(LegEnding.NODE_FAIL)], LegsConfig(max_failures=0)) or "")


def test_any_number_of_legs_may_end_by_walltime_if_each_commits_an_iteration():
    never = LegsConfig(max_failures=0)
    assert reason_to_stop([ended(LegEnding.WALLTIME, iteration) for iteration in range(9)], never) is None
    assert "after 2 too short leg(s)" in (reason_to_stop([ended(LegEnding.WALLTIME)] * 2, never) or "")


# -------------------------------------------------------------------------------------------------- when a leg stops
def leg_time(ends_at: float, now: float, iteration_seconds: list[float]) -> LegTime:
    time = LegTime(lambda: ends_at, lambda: now)
    time._recent.extend(iteration_seconds)
    return time


def test_a_leg_stops_when_its_next_iteration_and_a_checkpoint_may_not_fit():
    enough = 30.0 + 5.0 + SHUTDOWN_S
    assert leg_time(1000.0, 1000.0 - enough, [30.0, 30.0]).stop_reason(checkpoint_s=5.0) is None
    assert leg_time(1000.0, 1000.1 - enough, [30.0, 30.0]).stop_reason(checkpoint_s=5.0) is LegEnding.WALLTIME


def test_p95_is_exceeded_by_one_value_in_twenty():
    assert p95([]) == 0.0
    assert p95([7.0]) == 7.0
    assert p95([float(n) for n in range(1, 22)]) == 20.0


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, "preempted"), (signal.SIGUSR2, "walltime")])
def test_a_signal_ends_a_leg_after_its_iteration_and_only_while_the_handlers_are_installed(number, ending):
    time = leg_time(float("inf"), 0.0, [])
    before = signal.getsignal(number)
    with time.handling_signals():
        os.kill(os.getpid(), number)
        assert time.stop_reason(0.0) == ending
    assert signal.getsignal(number) is before
