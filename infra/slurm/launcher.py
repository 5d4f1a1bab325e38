"""A leg as a submitit job: a process on this machine today, an allocation of a SLURM cluster by the same interface."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import submitit

from roll_core.config.services import Launcher, LegsConfig


def submit_leg(
    legs: LegsConfig, num_gpus: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> submitit.Job[Any]:
    """Start `function(*arguments)` as a leg, with so many GPUs on each node; its logs and result lie in `folder`."""
    match legs.launcher:
        case Launcher.LOCAL:
            executor = submitit.LocalExecutor(folder=folder, max_num_timeout=0)
            executor.update_parameters(
                timeout_min=legs.time_limit_minutes,
                signal_delay_s=60,
                stderr_to_stdout=True,
                gpus_per_node=num_gpus,  # or submitit hides them all
                visible_gpus=_visible_gpus(),
            )
            with _inherited_output(folder / "launcher.log"):
                job = executor.submit(function, *arguments)
            # For slow file systems submitit waits 15 s for the result of a process that has ended; here it is there or lost.
            job._results_timeout_s = 0
            return job


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
