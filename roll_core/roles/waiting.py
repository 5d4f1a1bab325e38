"""Waits for replies of roles. Every wait has a deadline in seconds, and its error names the roles that were late or dead."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray

from roll_core.errors import DeadlineExceeded, RoleDied, RollError, origin

LOST_ROLE_ERRORS = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)
"""Errors that Ray raises when the called process, or the process that held a result, is gone."""


def wait_for(pending: Mapping[str, ray.ObjectRef], stage: str, deadline_s: float) -> dict[str, Any]:
    """Wait for all replies; return them by role name. The first failure ends the wait: the other roles may be stuck in a
    collective with the failed one."""
    replies = _wait_for(pending, stage, deadline_s)
    return {name: replies[name] for name in pending}


def wait_for_survivors(pending: Mapping[str, ray.ObjectRef], stage: str, deadline_s: float) -> dict[str, Any]:
    """Wait for all replies of roles that are independent of each other; return those of live roles by name."""
    return _wait_for(pending, stage, deadline_s, RoleDied)


def _wait_for(
    pending: Mapping[str, ray.ObjectRef],
    stage: str,
    deadline_s: float,
    *ignored: type[RollError],
) -> dict[str, Any]:
    """Wait for all replies until the deadline; errors of the `ignored` types only leave out the role that raised them."""
    name_of = {ref: name for name, ref in pending.items()}
    replies: dict[str, Any] = {}
    ends_at = time.monotonic() + deadline_s
    waiting = list(name_of)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, ends_at - time.monotonic()))
        if not ready:
            late = ", ".join(sorted(name_of[ref] for ref in waiting))
            raise DeadlineExceeded(f"deadlines.{stage}: no answer after {deadline_s:.0f} s from {late}")
        for ref in ready:
            with contextlib.suppress(*ignored):
                replies[name_of[ref]] = _result(ref, name_of[ref], stage)
    return replies


def _result(ref: ray.ObjectRef, name: str, stage: str) -> Any:
    """Return the result of a finished call; raise RoleDied if its role, or a role it called, is gone."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        # Caught first: an error raised by a method is also an instance of its cause's class.
        cause = origin(error)
        if isinstance(cause, RollError):
            raise cause from None
        if isinstance(cause, LOST_ROLE_ERRORS):
            raise RoleDied(f"{name} lost the role it was working with during {stage}") from None
        raise
    except ray.exceptions.ActorUnavailableError:
        raise RoleDied(f"{name} could not be reached during {stage}") from None
    except LOST_ROLE_ERRORS:
        raise RoleDied(f"{name} died during {stage}") from None
