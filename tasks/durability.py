"""The two kinds of task. There is no third: a test asserts that every task has one of these.

PURE: the answer depends on the inputs alone. Kept by inputs, so that a leg that starts over does not repeat it; retried.
STATE_CHANGING: moves an optimizer, an engine or the run itself. Never blindly retried; the roles answer a repeated request
id from the first answer, and a commit can happen only once.
"""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE

from roll_core.errors import DeadlineExceeded, RoleDied, UserError
from roll_core.types.manifest import Receipt

P = ParamSpec("P")
R = TypeVar("R")


class PureTask(Task[P, R]):
    """Kept by inputs and retried."""


class StateChangingTask(Task[P, R]):
    """Neither kept nor retried by Prefect."""


# The kind is the task's class, not a Prefect tag: every tag costs each task run a request for a concurrency slot.

PURE_RETRIES = 2
HANDLES = "services"
"""Parameter that carries live handles: no part of what an answer depends on, and nothing that could be hashed."""


def pure(run_name: str) -> Callable[[Callable[P, R]], PureTask[P, R]]:
    """Make a PURE task. `run_name` may name parameters: "collect {request.iteration}"."""
    return lambda function: PureTask(
        _logged(run_name, _timed(function)),
        task_run_name=run_name,
        retries=PURE_RETRIES,
        retry_delay_seconds=1,
        retry_condition_fn=_worth_retrying,
        persist_result=True,
        cache_policy=INPUTS - HANDLES + TASK_SOURCE,
    )


def state_changing(run_name: str) -> Callable[[Callable[P, R]], StateChangingTask[P, R]]:
    """Make a STATE_CHANGING task."""
    return lambda function: StateChangingTask(
        _logged(run_name, _timed(function)),
        task_run_name=run_name,
        retries=0,
        persist_result=False,
        cache_policy=NO_CACHE,
    )


def _worth_retrying(_task: Task[..., Any], _run: Any, state: Any) -> bool:
    """A dead or stuck role cannot answer the second time either, and a user's mistake does not mend itself."""
    return not isinstance(state.result(raise_on_failure=False), RoleDied | DeadlineExceeded | UserError)


def _timed(function: Callable[P, R]) -> Callable[P, R]:
    """Receipts say how long their stage took; the loop needs no timers."""

    @functools.wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        start = time.perf_counter()
        answer = function(*args, **kwargs)
        if isinstance(answer, Receipt):
            return answer.model_copy(update={"seconds": time.perf_counter() - start})
        return answer

    return timed


def _logged(run_name: str, function: Callable[P, R]) -> Callable[P, R]:
    """The leg's stage log says when a stage began and ended: a stage is a task that was given the leg's services."""
    signature = inspect.signature(function)
    if HANDLES not in signature.parameters:
        return function

    @functools.wraps(function)
    def logged(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        with arguments[HANDLES].stage_log.stage(run_name.format(**arguments)):
            return function(*args, **kwargs)

    return logged
