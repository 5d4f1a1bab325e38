"""SLURM at its worst: a signal while a leg starts, a controller that is away, a job that is held, refused or requeued.

Commands of SLURM are small scripts here. `tests/integration/test_slurm.py` has the real ones.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import pytest
from rich.console import Console

from flows import cli
from flows.cli.progress_view import live_view
from infra.slurm import node, queue
from infra.slurm.launcher import LegRequest
from infra.slurm.node import NodeReport, TaskIdentity
from infra.slurm.queue import EndTime, JobState, SlurmMissing, SlurmRefused, SlurmUnavailable, job_state, node_address
from infra.slurm.slurm import SlurmLauncher, SlurmLegJob, read_end, submission_error
from roll_core.config.operations.legs import SlurmLauncherConfig
from roll_core.types.leg import LegAllocation, LegEnding
from tasks import legs, progress
from tests.support import ROOT, tiny_config

REQUEST = LegRequest("tiny-1.leg-2", Path("leg-2"), 1, 1, 0, 60)
HELD = JobState("PENDING", "JobHeldUser")


@pytest.fixture
def commands(tmp_path, monkeypatch) -> Callable[[str, str], None]:
    """Function that installs a SLURM command as a shell script; other commands of SLURM are missing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    return install


# -------------------------------------------------------------------------------------------------- signals at the start
def sleep_without_reading(_: LegAllocation) -> None:
    """Leg that has not yet asked for the address of the Ray head."""
    time.sleep(600)


@contextlib.contextmanager
def process_for_ten_minutes() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def signals() -> Iterator[node._SignalForwarder]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield node._SignalForwarder()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_while_a_leg_starts_is_an_interruption(tmp_path, signals, number):
    """The driver dies with the head's address unread in its socket, which resets the connection."""
    task = TaskIdentity(job_id="7", restart=1, rank=0, node="n1", address="127.0.0.1", folder=tmp_path)
    leg = cloudpickle.dumps(sleep_without_reading)
    with node._driver_process(leg, EndTime("7", 0.0), tmp_path) as (driver, pipe), process_for_ten_minutes() as head:
        pipe.send("127.0.0.1:6379")
        os.kill(os.getpid(), number)
        signals.forward_to(driver)
        report = node._supervise(head, driver, pipe, task, signals)
    assert report == NodeReport(None, f"the leg's process ended with -{number.value}", signalled=True, restart=1)
    assert read_end(JobState("FAILED"), report).ending is LegEnding.PREEMPTED


@pytest.mark.parametrize("exit_code", ["143:0", "140:0", "0:15", "0:12"])
def test_a_signal_before_a_task_handles_signals_is_an_interruption(exit_code):
    assert read_end(JobState("FAILED", exit_code=exit_code), None).ending is LegEnding.PREEMPTED


def test_a_signal_while_submitit_handles_signals_is_an_interruption():
    trace = "...\nsubmitit.core.utils.UncompletedJobError: Job not requeued because: timed-out and not checkpointable."
    assert read_end(JobState("FAILED", exit_code="1:0"), trace).ending is LegEnding.PREEMPTED
    assert read_end(JobState("FAILED", exit_code="1:0"), "ValueError: why").ending is None
    assert read_end(JobState("FAILED", exit_code="1:0"), None).ending is None


@pytest.mark.parametrize("script", ["printed", "shipped"])
@pytest.mark.parametrize(("code", "requeues"), [(0, False), (1, False), (75, True), (140, True), (143, True)])
def test_a_script_requeues_itself_after_a_signal_while_python_started(commands, capsys, script, code, requeues):
    if script == "printed":
        assert cli.main(["sbatch", "configs/runs/qwen3-moe-30b.yaml"]) == 0
        lines = capsys.readouterr().out.splitlines()
    else:
        lines = (ROOT / "infra/slurm/rlvr.sbatch").read_text().splitlines()
    commands("scontrol", 'echo "$@"')
    ending = "\n".join([f"(exit {code})", *lines[-3:]])
    environment = os.environ | {"SLURM_JOB_ID": "7"}
    done = subprocess.run(["/bin/bash", "-c", ending], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "requeue 7\n" if requeues else "")


# -------------------------------------------------------------------------------------------------- states of jobs
def accounting(commands: Callable[[str, str], None], state: str) -> None:
    """Install a controller that has forgotten the job, and accounting that knows this state."""
    commands("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    commands("sacct", f'echo "{state}"')


@pytest.mark.parametrize(
    ("state", "ending"),
    [
        ("CANCELLED by 1000", LegEnding.CANCELLED),
        ("COMPLETED", None),
        ("LAUNCH_FAILED", LegEnding.NODE_FAIL),
        ("REVOKED", None),
        ("DEADLINE", LegEnding.WALLTIME),
        ("A_NEW_WORD", None),
        ("RUNNING", None),
    ],
)
def test_a_job_that_only_accounting_knows_is_over(commands, tmp_path, state, ending):
    accounting(commands, state)
    job = SlurmLegJob("7", tmp_path)
    assert job.has_ended()
    assert job.end().ending is ending
    assert state.split()[0] in job.end().cause


@pytest.mark.parametrize(
    ("state", "held_by"),
    [
        (HELD, "its user"),
        (JobState("PENDING", "JobHeldAdmin"), "an administrator"),
        (JobState("PENDING", "JobHoldMaxRequeue"), "SLURM, which requeued it too often"),
        (JobState("REQUEUE_HOLD", "None"), "SLURM (None)"),
        (JobState("PENDING", "launch_failed_requeued_held"), "SLURM (launch_failed_requeued_held)"),
    ],
)
def test_a_held_job_is_waited_for_and_says_how_to_release_it(tmp_path, state, held_by):
    job = SlurmLegJob("12", tmp_path)
    job._state = state
    assert not state.is_over
    assert job.obstacle == f"job 12 is held by {held_by}: release it with: scontrol release 12"


@pytest.mark.parametrize("state", [JobState("PENDING", "Priority"), JobState("RUNNING", "None"), JobState("COMPLETED")])
def test_a_job_that_is_not_held_has_no_obstacle(tmp_path, state):
    job = SlurmLegJob("12", tmp_path)
    job._state = state
    assert job.obstacle == ""


@dataclass
class QueuedJob:
    """Job whose states follow one another, one at each question whether it has ended."""

    states: list[JobState]
    job_id = "12"
    log = Path("log")
    poll_s = 0.0
    nodes = ""

    def has_ended(self) -> bool:
        self.state = self.states.pop(0)
        return self.state.is_over

    @property
    def obstacle(self) -> str:
        return "job 12 is held" if self.state.is_held else ""


class NoManifests:
    """Watch of a run that commits nothing."""

    def poll(self) -> None:
        pass


def test_what_a_run_waits_for_is_printed_by_the_command_that_follows_it(monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "get_run_logger", lambda: logging.getLogger("flow"))
    with open(tmp_path / "terminal", "w") as terminal, live_view(tiny_config(tmp_path), Console(file=terminal)):
        progress.announce_obstacle("job 12 is held")
    assert (tmp_path / "terminal").read_text().splitlines()[0] == "job 12 is held"


def test_a_flow_says_once_that_the_job_of_its_leg_is_held(monkeypatch, caplog):
    monkeypatch.setattr(progress, "get_run_logger", lambda: logging.getLogger("flow"))
    job = QueuedJob([JobState("RUNNING"), HELD, HELD, JobState("RUNNING"), HELD, JobState("COMPLETED")])
    legs.wait_for_end(job, NoManifests(), None)  # type: ignore[arg-type]
    assert [record.message for record in caplog.records if record.name == "flow"] == ["job 12 is held"] * 2


@pytest.mark.parametrize(("restarts", "is_taken"), [("1", False), ("0", True)])
def test_a_result_from_before_a_requeue_is_not_the_answer_of_the_second_start(commands, tmp_path, restarts, is_taken):
    fields = f"JobState=FAILED Reason=None Restarts={restarts} SubmitTime=Unknown StartTime=Unknown EndTime=Unknown"
    commands("scontrol", f'echo "JobId=7 {fields} ExitCode=1:0"')
    job = SlurmLegJob("7", tmp_path)
    with open(job._paths.result_pickle, "wb") as file:
        cloudpickle.dump(("success", NodeReport("the answer", restart=0)), file)
    assert job.has_ended()
    assert job.end().result == ("the answer" if is_taken else None)


# -------------------------------------------------------------------------------------------------- the controller is away
@pytest.fixture
def no_pauses(monkeypatch) -> list[float]:
    """Pauses in seconds that would have been made; time passes without waiting."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(pauses))
    return pauses


def test_a_controller_that_is_away_between_two_legs_is_waited_for(no_pauses):
    answers: list[Exception | str] = [SlurmUnavailable("squeue: timed out")] * 9 + ["the job"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    said: list[str] = []
    assert queue.wait_for_controller(ask, said.append) == "the job"
    assert no_pauses == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert said == ["SLURM does not answer (squeue: timed out): the run waits for it, up to 24 h"]


def test_a_controller_that_stays_away_is_given_up_after_a_day(no_pauses):
    def ask() -> None:
        raise SlurmUnavailable("squeue: timed out")

    with pytest.raises(SlurmUnavailable):
        queue.wait_for_controller(ask, print)
    assert 23 * 3600 < sum(no_pauses) <= 24 * 3600


@pytest.mark.parametrize("error", [SlurmMissing("squeue is not installed"), SlurmRefused("legs.launcher.partition")])
def test_what_no_wait_can_mend_is_not_waited_for(no_pauses, error):
    def ask() -> None:
        raise error

    with pytest.raises(type(error)):
        queue.wait_for_controller(ask, print)
    assert no_pauses == []


def test_a_leg_that_was_submitted_although_the_answer_was_lost_is_not_submitted_again(no_pauses):
    submitted: list[str] = []

    class LosingLauncher:
        """Launcher whose first answer to a submission is lost."""

        def find(self, prefix: str) -> dict[str, str]:
            return {name: "12" for name in submitted if name.startswith(prefix)}

        def submit(self, request: LegRequest, leg: object) -> str:
            submitted.append(request.name)
            raise SlurmUnavailable("sbatch: Socket timed out on send/recv operation")

        def attach(self, job_id: str, folder: Path) -> str:
            return job_id

    launcher = LosingLauncher()
    found = queue.wait_for_controller(lambda: legs.adopt_or_submit(launcher, REQUEST, print), print)  # type: ignore[arg-type]
    assert (found, submitted) == ("12", [REQUEST.name])


# -------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("answer", "key"),
    [
        ("sbatch: error: invalid partition specified: nowhere", "legs.launcher.partition"),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination",
            "legs.launcher.account",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "legs.launcher.qos"),
        ("sbatch: error: Memory specification can not be satisfied", "legs.launcher.memory_gigabytes"),
        ("sbatch: error: Requested time limit is invalid (missing or exceeds some limit)", "legs.time_limit_minutes"),
        ("sbatch: error: Batch job submission failed: Node count specification invalid", "cluster.nodes"),
        ("sbatch: unrecognized option '--nosuch=1'\nTry \"sbatch --help\" for more information", "legs.launcher.options"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "legs.launcher.options"),
    ],
)
def test_what_sbatch_refuses_is_one_sentence_with_the_key_and_exit_code_2(answer, key):
    error = submission_error(answer, REQUEST)
    assert isinstance(error, SlurmRefused)
    assert error.exit_code == 2
    assert str(error).startswith(f"{key}: ")
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "answer",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
        "sbatch: error: Batch job submission failed: Required partition not available (inactive or drain)",
    ],
)
def test_what_may_pass_by_itself_is_no_refusal(answer):
    assert isinstance(submission_error(answer, REQUEST), SlurmUnavailable)


def test_nodes_that_roll_itself_excluded_are_named_with_the_command_that_clears_them():
    request = LegRequest("tiny-1.leg-2", Path("leg-2"), 1, 1, 0, 60, exclude=("n1", "n2"))
    sentence = str(submission_error("sbatch: error: Requested node configuration is not available", request))
    assert "roll excludes n1, n2" in sentence
    assert "roll nodes --clear NODE" in sentence


def test_a_partition_that_does_not_exist_is_refused_before_the_name_of_the_run_is_taken(commands, tmp_path, capsys):
    commands("sbatch", 'echo "sbatch: error: invalid partition specified: nowhere" >&2; exit 1')
    settings = (
        f"work_dir={tmp_path}/work",
        f"store.uri={tmp_path}/store",
        "legs.launcher={kind: slurm, partition: nowhere}",
    )
    options = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["run", "configs/runs/quickstart.yaml", *options]) == 2
    assert not list((tmp_path / "store").glob("runs/*/config.json"))
    sentence = capsys.readouterr().err
    assert sentence.startswith("roll: legs.launcher.partition: SLURM refuses the job of a leg")
    assert "resume" not in sentence


@pytest.mark.parametrize(
    "says", ["Unable to contact slurm controller (connect failure)", "Requested node configuration is not available"]
)
def test_a_check_of_a_submission_passes_while_the_controller_is_away_or_all_nodes_are_drained(commands, says):
    commands("sbatch", f'echo "allocation failure: {says}" >&2; exit 1')
    SlurmLauncher(SlurmLauncherConfig()).check(REQUEST)


# -------------------------------------------------------------------------------------------------- containers
@pytest.mark.usefixtures("commands")
def test_without_scontrol_a_leg_ends_with_its_requested_time(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert EndTime("7", requested=1000.0)() == 1000.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "900")
    assert EndTime("7", requested=1000.0)() == 900.0


def test_a_controller_that_tells_no_end_of_a_job_does_not_move_it(commands):
    commands("scontrol", 'echo "JobState=RUNNING Reason=None SubmitTime=Unknown StartTime=Unknown EndTime=Unknown"')
    assert job_state("7").ends_at is None
    assert EndTime("7", requested=1000.0)() == 1000.0


@pytest.mark.usefixtures("commands")
def test_without_scontrol_the_address_of_a_node_is_that_of_its_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", {"n1": "10.0.0.17"}.__getitem__)
    assert node_address("n1") == "10.0.0.17"


@pytest.mark.usefixtures("commands")
def test_a_node_without_an_address_is_named_in_one_sentence():
    with pytest.raises(queue.RollError, match="node no.such.node.invalid: its address was not found"):
        node_address("no.such.node.invalid")
