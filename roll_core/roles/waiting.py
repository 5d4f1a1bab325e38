"""Every wait on a role has a deadline, and its error names who was late or who died."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray

from roll_core.errors import DeadlineExceeded, RoleDied, RollError

GONE = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)
"""What Ray raises when a process it needs, or one that held an answer, is no more."""


def wait_for(pending: Mapping[str, ray.ObjectRef], stage: str, deadline_s: float) -> dict[str, Any]:
    """Answers by name. The first failure ends the wait: the others may be stuck in a collective with the dead one."""
    answers = _wait_for(pending, stage, deadline_s)
    return {name: answers[name] for name in pending}


def wait_for_survivors(pending: Mapping[str, ray.ObjectRef], stage: str, deadline_s: float) -> dict[str, Any]:
    """Answers by name, of those that live: for roles that have nothing to do with each other."""
    return _wait_for(pending, stage, deadline_s, RoleDied)


def _wait_for(
    pending: Mapping[str, ray.ObjectRef],
    stage: str,
    deadline_s: float,
    *leave_out: type[RollError],
) -> dict[str, Any]:
    name_of = {ref: name for name, ref in pending.items()}
    answers: dict[str, Any] = {}
    ends_at = time.monotonic() + deadline_s
    waiting = list(name_of)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, ends_at - time.monotonic()))
        if not ready:
            late = ", ".join(sorted(name_of[ref] for ref in waiting))
            raise DeadlineExceeded(f"deadlines.{stage}: no answer after {deadline_s:.0f} s from {late}")
        for ref in ready:
            with contextlib.suppress(*leave_out):
                answers[name_of[ref]] = _answer(ref, name_of[ref], stage)
    return answers


def _answer(ref: ray.ObjectRef, name: str, stage: str) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        # First, because what a method raises is also an instance of its cause's class.
        if isinstance(error.cause, RollError):
            raise error.cause from None
        if isinstance(error.cause, GONE):
            raise RoleDied(f"{name} lost the role it was working with during {stage}") from None
        raise
    except GONE:
        raise RoleDied(f"{name} died during {stage}") from None
