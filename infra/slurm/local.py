"""A leg as a process on this machine. It ends with whoever launched it: there is no allocation to outlive it in."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from infra.slurm.launcher import JobEnd, LegFunction, LegRequest
from roll_core.types.leg import LegAllocation


class LocalLauncher:
    def submit(self, request: LegRequest, leg: LegFunction) -> "LocalLegJob":
        executor = submitit.LocalExecutor(folder=request.folder, max_num_timeout=0)
        executor.update_parameters(
            timeout_min=request.time_limit_minutes,
            signal_delay_s=60,
            stderr_to_stdout=True,
            gpus_per_node=request.gpus_per_node,  # or submitit hides them all
            visible_gpus=_visible_gpus(),
        )
        with _inherited_output(request.folder / "launcher.log"):
            return LocalLegJob(executor.submit(run_local_leg, leg, request.time_limit_minutes, os.getpid()))

    def find(self, prefix: str) -> dict[str, str]:  # noqa: ARG002
        return {}

    def attach(self, job_id: str, folder: Path) -> "LocalLegJob":
        raise AssertionError(f"job {job_id} of {folder} ended with whoever launched it")


class LocalLegJob:
    poll_s = 0.2
    nodes = ""

    def __init__(self, job: submitit.Job[Any]):
        self._job = job
        # For slow file systems submitit waits 15 s for the result of a process that has ended; here it is there or lost.
        job._results_timeout_s = 0
        self.job_id = job.job_id
        self.log = Path(job.paths.stdout)

    def describe(self) -> str:
        return "has ended" if self.has_ended() else "runs on this machine"

    def has_ended(self) -> bool:
        return self._job.done()

    def end(self) -> JobEnd:
        try:
            return JobEnd(None, self._job.result(), "")
        except (UncompletedJobError, FailedJobError) as error:
            return JobEnd(None, None, f"the leg's process died ({last_line(str(error))})")

    def cancel(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._job.cancel()


def run_local_leg(leg: LegFunction, time_limit_minutes: int, launcher_pid: int) -> Any:
    """What the leg's process runs."""
    _die_with(launcher_pid)
    ends_at = time.time() + 60 * time_limit_minutes
    return leg(LegAllocation(ends_at=lambda: ends_at))


def last_line(trace: str) -> str:
    """What a traceback comes down to; submitit's messages carry the leg's own, and then say where its logs are."""
    lines = [line.strip() for line in trace.split("You can check full logs")[0].splitlines() if line.strip(" -=")]
    return lines[-1] if lines else "no trace"


def _die_with(launcher_pid: int) -> None:
    launcher = os.pidfd_open(launcher_pid)

    def watch() -> None:
        select.select([launcher], [], [])  # readable once it has ended, even while nobody has reaped it
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()


def _visible_gpus() -> tuple[int, ...]:
    """Those that whoever started us chose by number; none if that was left open."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(int(gpu) for gpu in chosen) if all(gpu.strip().isdigit() for gpu in chosen) else ()


@contextlib.contextmanager
def _inherited_output(path: Path) -> Iterator[None]:
    """Processes started here write to a file, not to our terminal.

    submitit's local controller inherits our output: Ctrl-C would print its traceback, and a pipe we write to would stay
    open for as long as the leg lives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = [os.dup(1), os.dup(2)]
    try:
        with open(path, "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        yield
    finally:
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
