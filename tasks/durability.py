"""The two kinds of task. There is no third: a test asserts that every task has one of these.

PURE: the answer depends on the inputs alone. Kept by inputs, so that a leg that starts over does not repeat it; tried again
after failures that pass by themselves, as `retries` in the config says.
STATE_CHANGING: moves an optimizer, an engine or the run itself. Never blindly retried; the roles answer a repeated request
id from the first answer, and a commit can happen only once.
"""

import functools
import inspect
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE

from roll_core.errors import FailureClass, RollError, classify, one_line
from roll_core.retries import pauses
from roll_core.types.manifest import Receipt

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


class PureTask(Task[P, R]):
    """Kept by inputs, and repeated after failures that pass by themselves."""


class StateChangingTask(Task[P, R]):
    """Neither kept nor repeated."""


# The kind is the task's class, not a Prefect tag: every tag costs each task run a request for a concurrency slot.

HANDLES = "services"
"""Parameter that carries live handles: no part of what an answer depends on, and nothing that could be hashed."""


def pure(run_name: str) -> Callable[[Callable[P, R]], PureTask[P, R]]:
    """Make a PURE task. `run_name` may name parameters: "collect {request.iteration}"."""
    return lambda function: PureTask(
        _logged(run_name, _timed(_repeated(function))),
        task_run_name=run_name,
        retries=0,  # Prefect's are fixed where a task is made; ours are in the config
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


def _repeated(function: Callable[P, R]) -> Callable[P, R]:
    """Tried again while failures pass by themselves.

    Ours do not count: who raised them has waited for as long as the config allows, or is dead. The next leg tries those.
    """
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> R:
        services = parameters.bind(*args, **kwargs).arguments[HANDLES]
        for pause in pauses(services.config.retries):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if isinstance(error, RollError) or classify(error) is not FailureClass.TRANSIENT:
                    raise
                log.warning("%s: %s; trying again in %.1f s", function.__name__, one_line(error), pause)
            time.sleep(pause)
        return function(*args, **kwargs)

    return repeated


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
