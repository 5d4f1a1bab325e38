"""Queries to the SLURM controller through its commands (scontrol, squeue, scancel, sacct). Used by the rest of this package.

Accounting (sacct) is optional; where it exists, it knows jobs that the controller has forgotten. SLURM's commands block
while the controller is down, so each has a timeout. A timeout says nothing about a job: it raises SlurmUnavailable. Inside a
container there may be no SLURM commands at all: a node then knows its address and its end time from its environment.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from roll_core.errors import FailureClass, RollError, UserError
from roll_core.types.leg import LegEnding

T = TypeVar("T")

COMMAND_TIMEOUT_S = 30.0
"""Seconds that one SLURM command may take."""
ENDED: dict[str, LegEnding | None] = {
    "COMPLETED": None,
    "FAILED": None,
    "CANCELLED": LegEnding.CANCELLED,
    "TIMEOUT": LegEnding.WALLTIME,
    "DEADLINE": LegEnding.WALLTIME,
    "PREEMPTED": LegEnding.PREEMPTED,
    "NODE_FAIL": LegEnding.NODE_FAIL,
    "BOOT_FAIL": LegEnding.NODE_FAIL,
    "LAUNCH_FAILED": LegEnding.NODE_FAIL,
    "RECONFIG_FAIL": LegEnding.NODE_FAIL,
    "OUT_OF_MEMORY": LegEnding.OUT_OF_MEMORY,
    "REVOKED": None,
}
"""Final job states of SLURM, each with the ending of the leg that it implies; None if only the leg knows its ending."""


INTERRUPTED_BY = (signal.SIGTERM, signal.SIGUSR2)
"""Signals by which SLURM asks a job to end: for a preemption, and before its time limit."""
CONTROLLER_AWAY_S = 24 * 3600.0
"""Seconds that a flow waits for a controller that does not reply. Longer than an upgrade of SLURM, which takes hours."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Seconds between two questions to a controller that is away: at first, and at most. Each pause is twice the one before."""


class SlurmUnavailable(RollError):
    """SLURM's controller did not reply in time, or refused the command."""

    failure = FailureClass.TRANSIENT


class SlurmMissing(SlurmUnavailable):
    """SLURM's commands are not installed on this machine, or in this container."""


class SlurmRefused(UserError):
    """SLURM refused a job because of what it requests. The message names the config keys."""


def wait_for_controller(query: Callable[[], T], notify: Callable[[str], None]) -> T:
    """Return the result of a query. While the controller is away, ask again with growing pauses, for CONTROLLER_AWAY_S.

    `notify` gets one sentence when the wait begins. Nothing is lost meanwhile: what runs goes on running, and what is
    committed is in the store.
    """
    ends_at, pause_s = time.monotonic() + CONTROLLER_AWAY_S, FIRST_PAUSE_S
    while True:
        try:
            return query()
        except SlurmMissing:
            raise
        except SlurmUnavailable as error:
            if time.monotonic() + pause_s > ends_at:
                raise
            if pause_s == FIRST_PAUSE_S:
                notify(f"SLURM does not answer ({error}): the run waits for it, up to {CONTROLLER_AWAY_S / 3600:.0f} h")
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


@dataclass(frozen=True)
class JobState:
    """State of a SLURM job. Times are in seconds since the epoch; None if SLURM does not know them.

    Example: JobState(name="PENDING", reason="Resources", submitted_at=1794780000.0, starts_at=1794783600.0)
    """

    name: str
    """SLURM's name of the state, such as PENDING or RUNNING."""
    reason: str = ""
    """SLURM's reason why the job is in this state, such as Priority."""
    nodes: str = ""
    """Node list in SLURM's notation, such as n[1-2]."""
    lost_nodes: tuple[str, ...] = ()
    """Names of nodes that failed."""
    submitted_at: float | None = None
    starts_at: float | None = None
    """Start time; for a pending job SLURM's estimate of it."""
    ends_at: float | None = None
    """End of the time limit."""
    restarts: int | None = None
    """Number of times SLURM requeued the job."""
    exit_code: str = ""
    """Exit code and signal of the batch script, such as 143:0; "" if SLURM does not tell."""

    @property
    def is_over(self) -> bool:
        """True if the job is in a final state."""
        return self.name in ENDED

    @property
    def was_interrupted(self) -> bool:
        """True if the job ended by a signal that asks a job to end. A shell reports signal N as exit code 128 + N."""
        code, _, number = self.exit_code.partition(":")
        return any(code == str(128 + each) or number == str(each.value) for each in INTERRUPTED_BY)

    @property
    def is_held(self) -> bool:
        """True if the job waits until a person releases it."""
        waits = self.name in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
        return waits and re.search("held|hold", f"{self.name} {self.reason}", re.IGNORECASE) is not None

    @property
    def held_by(self) -> str:
        """Holder of a held job, in words."""
        match self.reason:
            case "JobHeldUser":
                return "its user"
            case "JobHeldAdmin":
                return "an administrator"
            case "JobHoldMaxRequeue":
                return "SLURM, which requeued it too often"
            case reason:
                return f"SLURM ({reason})"

    def describe(self, now: float) -> str:
        """Describe the state in a few words; `now` is in seconds since the epoch.

        Example: waits for 25 min (Resources), expected to start in 35 min
        """
        match self.name:
            case "PENDING":
                waited = f" for {_minutes(now - self.submitted_at)}" if self.submitted_at is not None else ""
                expected = f", expected to start in {_minutes(self.starts_at - now)}" if self.starts_at is not None else ""
                return f"waits{waited} ({self.reason}){expected}"
            case "RUNNING":
                left = f", {_minutes(self.ends_at - now)} left" if self.ends_at is not None else ""
                return f"runs on {self.nodes}{left}"
            case name:
                return f"is {name.lower()}"


FORGOTTEN = JobState("FORGOTTEN")
"""State of a job that ended so long ago that neither the controller nor accounting knows it."""


STILL_RUNNING = JobState("RUNNING")
"""State of the job that this process itself is part of."""


def job_state(job_id: str) -> JobState:
    """Query the state of a job: from the controller, else from accounting, else FORGOTTEN."""
    try:
        fields = _fields(run_command("scontrol", "show", "job", "--oneliner", job_id))
    except SlurmUnavailable as error:
        if "Invalid job id" not in str(error):
            raise
        return _from_accounting(job_id)
    return JobState(
        name=fields["JobState"],
        reason=fields["Reason"],
        nodes=fields.get("NodeList", ""),
        submitted_at=_seconds(fields["SubmitTime"]),
        starts_at=_seconds(fields["StartTime"]),
        lost_nodes=tuple(filter(None, [fields.get("FailedNode", "")])),
        ends_at=_seconds(fields["EndTime"]),
        restarts=int(fields.get("Restarts", "0")),
        exit_code=fields.get("ExitCode", ""),
    )


def find_jobs(prefix: str) -> dict[str, str]:
    """Map name to job id of this user's pending and running jobs whose names start with `prefix`; the newest per name."""
    lines = run_command("squeue", "--me", "--noheader", "--sort=i", "--format=%i %j").splitlines()
    id_of = {name: job_id for job_id, _, name in (line.partition(" ") for line in lines)}
    return {name: job_id for name, job_id in id_of.items() if name.startswith(prefix)}


USABLE_STATES = "idle,mixed,allocated,completing"
"""States of nodes, in SLURM's words, that have a job or can get one."""


def num_other_nodes(partition: str | None, excluded: Sequence[str]) -> int:
    """Number of usable nodes of a partition, or of the default partition, besides those excluded (in SLURM's notation)."""
    options = ["--partition", partition] if partition else []
    lines = run_command(
        "sinfo", "--noheader", "--Node", f"--states={USABLE_STATES}", "--format=%N %P", *options
    ).splitlines()
    found = {node for node, name in (line.split() for line in lines) if partition or name.endswith("*")}  # * is the default
    return len(found - set(run_command("scontrol", "show", "hostnames", ",".join(excluded)).split()))


def cancel_job(job_id: str) -> None:
    run_command("scancel", job_id)


def node_address(node: str) -> str:
    """IP address of a node, by which other nodes reach it: from SLURM, else by the node's name.

    Inside a container there may be no scontrol to ask.
    """
    host = node
    with contextlib.suppress(SlurmUnavailable):
        host = _fields(run_command("scontrol", "show", "node", "--oneliner", node))["NodeAddr"]
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise RollError(f"node {node}: its address was not found: neither by scontrol nor by its name ({error})") from None


class EndTime:
    """Callable that returns when a job's time limit ends, in seconds since the epoch.

    Users and administrators can move the limit of a running job, so it is queried again. Until the controller has replied
    once, the time in SLURM_JOB_END_TIME holds, or else `requested`. While the controller is down, the last known time holds.
    """

    REFRESH_S = 5.0
    """Minimum seconds between two queries."""

    def __init__(self, job_id: str, requested: float):
        """Track the end of a job whose requested time ends at `requested`, in seconds since the epoch."""
        self._job_id = job_id
        self._refreshed_at = float("-inf")
        self._ends_at = float(os.environ.get("SLURM_JOB_END_TIME") or requested)

    def __call__(self) -> float:
        if time.monotonic() - self._refreshed_at > self.REFRESH_S:
            self._refreshed_at = time.monotonic()
            with contextlib.suppress(SlurmUnavailable):
                self._ends_at = job_state(self._job_id).ends_at or self._ends_at
        return self._ends_at


def _from_accounting(job_id: str) -> JobState:
    """Read the state of a job that the controller does not know from accounting; FORGOTTEN if accounting is missing or does
    not know the job, either.

    Such a job is over, whatever accounting calls its state. Example of a state: CANCELLED by 1000
    """
    try:
        states = run_command(
            "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State"
        ).split("\n")
    except SlurmUnavailable:
        return FORGOTTEN
    words = [state.split()[0] for state in states if state.strip()]
    if not words:
        return FORGOTTEN
    return JobState(words[-1]) if words[-1] in ENDED else JobState("FAILED", reason=f"accounting says {words[-1]}")


def run_command(*command: str, script: str = "") -> str:
    """Run a SLURM command with a script as its input, and return its output; SlurmUnavailable if it fails or takes too
    long."""
    try:
        completed = subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise SlurmMissing(f"{command[0]} is not installed here: this is no machine of a SLURM cluster") from None
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"{command[0]}: {error}") from None
    if completed.returncode:
        raise SlurmUnavailable(f"{command[0]}: {completed.stderr.strip()}")
    return completed.stdout


def _fields(text: str) -> dict[str, str]:
    """Parse the `Key=value` pairs of `scontrol --oneliner`."""
    return dict(re.findall(r"(\S+?)=(\S*)", text))


def _minutes(seconds: float) -> str:
    return f"{max(0.0, seconds) / 60:.0f} min"


def _seconds(time_text: str) -> float | None:
    """Convert SLURM's local time to seconds since the epoch; None for its words `Unknown` and `None`."""
    return datetime.fromisoformat(time_text).timestamp() if time_text[:1].isdigit() else None
