"""Contract of every launcher, tested on local processes and on a real SLURM cluster."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from infra.slurm.launcher import JobEnd, Launcher, LegJob, LegRequest
from infra.slurm.local import LocalLauncher
from infra.slurm.queue import SlurmRefused
from infra.slurm.slurm import SlurmLauncher
from roll_core.config.operations import legs as launchers
from roll_core.types.leg import LegAllocation, LegEnding
from tests.support import wait_until

SMALL = launchers.SlurmLauncherConfig(partition="low", exclusive=False, cpus_per_node=1, memory_gigabytes=1)


@pytest.fixture
def local() -> Iterator[LocalLauncher]:
    # A shell starts background commands with SIGINT ignored. Children inherit that, and cancelling a leg sends SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield LocalLauncher()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def on_slurm(slurm, monkeypatch) -> SlurmLauncher:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    return SlurmLauncher(SMALL)


@pytest.fixture(params=["local", "on_slurm"])
def launcher(request) -> Launcher:
    return request.getfixturevalue(request.param)


def leg_request(folder: Path, name: str = "contract") -> LegRequest:
    return LegRequest(
        name=name, folder=folder, nodes=1, devices_per_node=1, gpus_per_node=0, time_limit_minutes=10, exclude=()
    )


def wait_for_end(job: LegJob) -> JobEnd:
    wait_until(job.has_ended, f"job {job.job_id} ends")
    return job.end()


def seconds_left(allocation: LegAllocation) -> float:
    """Leg that returns the seconds until its time limit."""
    return allocation.ends_at() - time.time()


def die(_: LegAllocation) -> None:
    """Leg that exits at once without a result."""
    os._exit(3)


def write_pid_and_sleep(pid_file: Path, _: LegAllocation) -> None:
    """Leg that runs for ten minutes."""
    pid_file.write_text(str(os.getpid()))
    time.sleep(600)


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


def test_a_leg_knows_its_time_limit_and_its_result_arrives(launcher, tmp_path):
    end = wait_for_end(launcher.submit(leg_request(tmp_path), seconds_left))
    assert end.ending is None
    assert 300 < end.result <= 600


def test_a_leg_that_dies_has_a_cause_and_no_result(launcher, tmp_path):
    end = wait_for_end(launcher.submit(leg_request(tmp_path), die))
    assert end.result is None
    assert end.cause


def test_a_cancelled_leg_ends_with_its_processes_and_is_not_found_any_more(launcher, tmp_path):
    pid_file = tmp_path / "pid"
    job = launcher.submit(leg_request(tmp_path, "to-cancel"), partial(write_pid_and_sleep, pid_file))
    wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()), "the leg runs")
    job.cancel()
    end = wait_for_end(job)
    assert end.result is None
    assert end.ending in (None, LegEnding.CANCELLED)
    wait_until(lambda: not is_alive(int(pid_file.read_text())), "the leg's process is gone")
    assert launcher.find("to-cancel") == {}
    job.cancel()


@pytest.mark.usefixtures("on_slurm")
def test_a_job_that_slurm_refuses_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(SlurmRefused, match="legs.launcher.partition: .*invalid partition specified: nowhere") as caught:
        SlurmLauncher(launchers.SlurmLauncherConfig(partition="nowhere")).submit(leg_request(tmp_path), die)
    assert "\n" not in str(caught.value)


def test_a_slurm_leg_outlives_the_process_that_submitted_it_and_is_found_by_its_name(on_slurm, tmp_path):
    submitted = on_slurm.submit(leg_request(tmp_path, "left-behind"), partial(write_pid_and_sleep, tmp_path / "pid"))
    assert on_slurm.find("left-") == {"left-behind": submitted.job_id}
    job = on_slurm.attach(submitted.job_id, tmp_path)
    assert not job.has_ended()
    job.cancel()
    assert wait_for_end(job).ending is LegEnding.CANCELLED
