"""A leg as a submitit job: a process on this machine today, an allocation of a SLURM cluster by the same interface."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit

from roll_core.config.services import Launcher, LegsConfig


def submit_leg(
    legs: LegsConfig, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> submitit.Job[Any]:
    """Start `function(*arguments)` as a leg; its logs and result lie in `folder`."""
    match legs.launcher:
        case Launcher.LOCAL:
            executor = submitit.LocalExecutor(folder=folder, max_num_timeout=0)
            executor.update_parameters(timeout_min=legs.time_limit_minutes, signal_delay_s=60, stderr_to_stdout=True)
            return executor.submit(function, *arguments)
