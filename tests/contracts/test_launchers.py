"""What every launcher owes a leg: the same suite on this machine's own processes and on a real SLURM."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from infra.slurm.launcher import JobEnd, Launcher, LegJob, LegRequest
from infra.slurm.local import LocalLauncher
from infra.slurm.queue import SlurmUnavailable
from infra.slurm.slurm import SlurmLauncher
from roll_core.config.operations import legs as launchers
from roll_core.types.leg import LegAllocation, LegEnding
from tests.integration.conftest import wait_until

SMALL = launchers.SlurmLauncherConfig(partition="low", exclusive=False, cpus_per_node=1, memory_gigabytes=1)


@pytest.fixture
def local() -> Iterator[LocalLauncher]:
    # Whoever starts tests in the background of a shell makes them, and their children, deaf to the signal that cancels.
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


def a_request(folder: Path, name: str = "contract") -> LegRequest:
    return LegRequest(
        name=name, folder=folder, nodes=1, devices_per_node=1, gpus_per_node=0, time_limit_minutes=10, exclude=()
    )


def ended(job: LegJob) -> JobEnd:
    wait_until(job.has_ended, f"job {job.job_id} ends")
    return job.end()


def seconds_left(allocation: LegAllocation) -> float:
    return allocation.ends_at() - time.time()


def die(_: LegAllocation) -> None:
    os._exit(3)


def stay(note: Path, _: LegAllocation) -> None:
    note.write_text(str(os.getpid()))
    time.sleep(600)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


def test_a_leg_knows_when_it_must_end_and_what_it_answers_arrives(launcher, tmp_path):
    end = ended(launcher.submit(a_request(tmp_path), seconds_left))
    assert end.ending is None
    assert 300 < end.result <= 600


def test_a_leg_that_dies_leaves_no_answer_and_a_reason(launcher, tmp_path):
    end = ended(launcher.submit(a_request(tmp_path), die))
    assert end.result is None
    assert end.cause


def test_a_leg_that_is_cancelled_ends_with_all_it_had_and_is_not_found_any_more(launcher, tmp_path):
    note = tmp_path / "pid"
    job = launcher.submit(a_request(tmp_path, "to-cancel"), partial(stay, note))
    wait_until(lambda: note.exists() and bool(note.read_text()), "the leg runs")
    job.cancel()
    end = ended(job)
    assert end.result is None
    assert end.ending in (None, LegEnding.CANCELLED)
    wait_until(lambda: not is_alive(int(note.read_text())), "the leg's process is gone")
    assert launcher.find("to-cancel") == {}
    job.cancel()


@pytest.mark.usefixtures("on_slurm")
def test_what_slurm_refuses_is_told_in_one_sentence(tmp_path):
    with pytest.raises(SlurmUnavailable, match="could not be submitted: .*invalid partition specified: nowhere") as caught:
        SlurmLauncher(launchers.SlurmLauncherConfig(partition="nowhere")).submit(a_request(tmp_path), die)
    assert "\n" not in str(caught.value)


def test_a_slurm_leg_outlives_whoever_submitted_it_and_is_found_by_its_name(on_slurm, tmp_path):
    submitted = on_slurm.submit(a_request(tmp_path, "left-behind"), partial(stay, tmp_path / "pid"))
    assert on_slurm.find("left-") == {"left-behind": submitted.job_id}
    job = on_slurm.attach(submitted.job_id, tmp_path)
    assert not job.has_ended()
    job.cancel()
    assert ended(job).ending is LegEnding.CANCELLED
