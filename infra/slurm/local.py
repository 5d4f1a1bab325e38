"""Local launcher: a leg as a process on this machine, for runs without SLURM.

The leg's process is killed when the launching process ends, since no allocation exists in which it could outlive that.
"""

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
    """Launcher that runs a leg in a child process."""

    def submit(self, request: LegRequest, leg: LegFunction) -> "LocalLegJob":
        executor = submitit.LocalExecutor(folder=request.folder, max_num_timeout=0)
        executor.update_parameters(
            timeout_min=request.time_limit_minutes,
            signal_delay_s=60,
            stderr_to_stdout=True,
            gpus_per_node=request.gpus_per_node,  # with 0, submitit hides all GPUs
            visible_gpus=_visible_gpus(),
        )
        with _redirected_output(request.folder / "launcher.log"):
            return LocalLegJob(executor.submit(run_local_leg, leg, request.time_limit_minutes, os.getpid()))

    def find(self, prefix: str) -> dict[str, str]:  # noqa: ARG002
        return {}

    def attach(self, job_id: str, folder: Path) -> "LocalLegJob":
        raise AssertionError(f"job {job_id} of {folder} ended with whoever launched it")


class LocalLegJob:
    """Leg that runs in a child process of the launcher."""

    poll_s = 0.2
    nodes = ""
    obstacle = ""

    def __init__(self, job: submitit.Job[Any]):
        self._job = job
        # After the process has ended, submitit waits 15 s for its result, for slow file systems. On a local disk the result
        # is there at once or lost.
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
    """Run a leg in this process, which is killed when the launcher's process ends."""
    _end_with(launcher_pid)
    ends_at = time.time() + 60 * time_limit_minutes
    return leg(LegAllocation(ends_at=lambda: ends_at))


def last_line(trace: str) -> str:
    """Return the last line of the traceback in a submitit error message, without the remark on log files that follows it."""
    lines = [line.strip() for line in trace.split("You can check full logs")[0].splitlines() if line.strip(" -=")]
    return lines[-1] if lines else "no trace"


def _end_with(launcher_pid: int) -> None:
    """Kill this process (SIGKILL) when the launcher's process ends."""
    launcher = os.pidfd_open(launcher_pid)

    def kill_when_launcher_ends() -> None:
        select.select([launcher], [], [])  # readable once the launcher has ended, even before it is reaped
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_when_launcher_ends, name="watch-launcher", daemon=True).start()


def _visible_gpus() -> tuple[int, ...]:
    """GPU indices in CUDA_VISIBLE_DEVICES; empty if it is unset or does not hold plain indices."""
    gpu_ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(int(gpu) for gpu in gpu_ids) if all(gpu.strip().isdigit() for gpu in gpu_ids) else ()


@contextlib.contextmanager
def _redirected_output(path: Path) -> Iterator[None]:
    """Redirect the standard output and error of processes started in the block to a file.

    submitit's local controller inherits these streams. Without the redirection Ctrl-C would print its traceback, and a pipe
    at our standard output would stay open as long as the leg lives.
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
