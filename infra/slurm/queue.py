"""What is asked of SLURM's controller, and what it answers. Needs no accounting; where there is some, it remembers longer.

Commands wait for a controller that is away, so each has a limit, and no answer is not an answer.
"""

import contextlib
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime

from roll_core.errors import RollError
from roll_core.types.leg import LegEnding

COMMAND_LIMIT_S = 30.0
ENDED: dict[str, LegEnding | None] = {
    "COMPLETED": None,
    "FAILED": None,
    "CANCELLED": LegEnding.CANCELLED,
    "TIMEOUT": LegEnding.WALLTIME,
    "DEADLINE": LegEnding.WALLTIME,
    "PREEMPTED": LegEnding.PREEMPTED,
    "NODE_FAIL": LegEnding.NODE_FAIL,
    "BOOT_FAIL": LegEnding.NODE_FAIL,
    "OUT_OF_MEMORY": LegEnding.OUT_OF_MEMORY,
}
"""States in which a job is over, and what each says about the leg it carried."""


class SlurmUnavailable(RollError):
    """SLURM's controller did not answer, or refused."""


@dataclass(frozen=True)
class JobState:
    """Times are in seconds since the epoch; SLURM's guess of when a job starts is one of them.

    Example: JobState(name="PENDING", reason="Resources", submitted_at=1794780000.0, starts_at=1794783600.0)
    """

    name: str
    reason: str = ""
    nodes: str = ""
    lost_nodes: tuple[str, ...] = ()
    submitted_at: float | None = None
    starts_at: float | None = None
    ends_at: float | None = None

    @property
    def is_over(self) -> bool:
        return self.name in ENDED

    def describe(self, now: float) -> str:
        """Example: waits for 25 min (Resources), expected to start in 35 min"""
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
"""Of a job that ended so long ago that nobody knows how."""


STILL_RUNNING = JobState("RUNNING")


def job_state(job_id: str) -> JobState:
    try:
        fields = _fields(_ask("scontrol", "show", "job", "--oneliner", job_id))
    except SlurmUnavailable as error:
        if "Invalid job id" not in str(error):
            raise
        return _remembered(job_id)
    return JobState(
        name=fields["JobState"],
        reason=fields["Reason"],
        nodes=fields.get("NodeList", ""),
        submitted_at=_seconds(fields["SubmitTime"]),
        starts_at=_seconds(fields["StartTime"]),
        lost_nodes=tuple(filter(None, [fields.get("FailedNode", "")])),
        ends_at=_seconds(fields["EndTime"]),
    )


def find_jobs(prefix: str) -> dict[str, str]:
    """Jobs of ours that are not over and whose names begin so; of equal names, the newest."""
    lines = _ask("squeue", "--me", "--noheader", "--sort=i", "--format=%i %j").splitlines()
    id_of = {name: job_id for job_id, _, name in (line.partition(" ") for line in lines)}
    return {name: job_id for name, job_id in id_of.items() if name.startswith(prefix)}


def cancel_job(job_id: str) -> None:
    _ask("scancel", job_id)


def node_address(node: str) -> str:
    """By which the other nodes reach one."""
    return socket.gethostbyname(_fields(_ask("scontrol", "show", "node", "--oneliner", node))["NodeAddr"])


class EndTime:
    """When a job ends, asked for again now and then: whoever may, moves it. While nobody answers, the last answer holds."""

    REFRESH_S = 5.0

    def __init__(self, job_id: str):
        self._job_id = job_id
        self._asked_at = float("-inf")
        self._ends_at = float("inf")

    def __call__(self) -> float:
        if time.monotonic() - self._asked_at > self.REFRESH_S:
            self._asked_at = time.monotonic()
            with contextlib.suppress(SlurmUnavailable):
                self._ends_at = job_state(self._job_id).ends_at or float("inf")
        return self._ends_at


def _remembered(job_id: str) -> JobState:
    """From accounting, of a job that the controller has forgotten."""
    try:
        states = _ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State").split()
    except SlurmUnavailable:
        return FORGOTTEN
    return JobState(states[-1]) if states else FORGOTTEN


def _ask(*words: str) -> str:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        raise SlurmUnavailable(f"{words[0]}: {error}") from None
    if done.returncode:
        raise SlurmUnavailable(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout


def _fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", text))


def _minutes(seconds: float) -> str:
    return f"{max(0.0, seconds) / 60:.0f} min"


def _seconds(time_text: str) -> float | None:
    """SLURM writes local time, or Unknown, or None."""
    return datetime.fromisoformat(time_text).timestamp() if time_text[:1].isdigit() else None
