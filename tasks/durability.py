"""Decorators of the two kinds of task, PURE and STATE_CHANGING, for all files of this package.

A test asserts that every task is one of them.

PURE: the result depends on the inputs alone. It is cached by inputs, so a leg that starts over does not compute it again. It
is retried after transient failures, as `retries` in the config says.
STATE_CHANGING: the task moves an optimizer, an engine or the run itself. It is neither cached nor retried. Requests to roles
are idempotent: a role returns the first reply to a repeated request id. A commit can succeed only once.
"""

import functools
import inspect
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE
from prefect.context import FlowRunContext

from roll_core.errors import FailureClass, RollError, classify, one_line
from roll_core.reporting.stage_log import iteration_in
from roll_core.retries import backoff_delays
from roll_core.types.manifest import Receipt, Updated

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


class PureTask(Task[P, R]):
    """Task whose result is cached by its inputs, and which is retried after transient failures."""


class StateChangingTask(Task[P, R]):
    """Task that is neither cached nor retried."""


# The kind is the task's class, not a Prefect tag: for every tag, each task run requests a concurrency slot from the server.

SERVICES_PARAMETER = "services"
"""Name of the task parameter that holds live handles. It is left out of cache keys: results do not depend on it, and it
cannot be hashed."""


def forget_dead_results() -> None:
    """Drop Prefect's records of task results that no longer exist. A flow run keeps the state of every task run, to draw
    arrows between tasks, and a leg has thousands of them: 40 kB an iteration."""
    context = FlowRunContext.get()
    results = {} if context is None else context.run_results
    for key, (_, _, reference) in list(results.items()):
        if reference is not None and reference() is None:
            del results[key]


def pure(run_name: str) -> Callable[[Callable[P, R]], PureTask[P, R]]:
    """Decorate a function as a PURE task. `run_name` may use its parameters: "collect {request.iteration}"."""
    return lambda function: PureTask(
        _logged(run_name, _timed(_retried(function))),
        task_run_name=run_name,
        retries=0,  # Prefect fixes the number when the task is defined; ours comes from the config, in `_retried`
        persist_result=True,
        cache_policy=INPUTS - SERVICES_PARAMETER + TASK_SOURCE,
    )


def state_changing(run_name: str) -> Callable[[Callable[P, R]], StateChangingTask[P, R]]:
    """Decorate a function as a STATE_CHANGING task. `run_name` may use its parameters."""
    return lambda function: StateChangingTask(
        _logged(run_name, _timed(function)),
        task_run_name=run_name,
        retries=0,
        persist_result=False,
        cache_policy=NO_CACHE,
    )


def _retried(function: Callable[P, R]) -> Callable[P, R]:
    """Retry a function after transient failures, with exponential backoff.

    A RollError is not retried here: its origin has already retried for as long as the config allows, or is dead. The next
    leg tries again.
    """
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def retried(*args: P.args, **kwargs: P.kwargs) -> R:
        services = parameters.bind(*args, **kwargs).arguments[SERVICES_PARAMETER]
        for pause in backoff_delays(services.config.retries):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if isinstance(error, RollError) or classify(error) is not FailureClass.TRANSIENT:
                    raise
                log.warning("%s: %s; trying again in %.1f s", function.__name__, one_line(error), pause)
            time.sleep(pause)
        return function(*args, **kwargs)

    return retried


def _timed(function: Callable[P, R]) -> Callable[P, R]:
    """Fill in `seconds` of the receipt that a function returns."""

    @functools.wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        if isinstance(result, Receipt):
            return result.model_copy(update={"seconds": time.perf_counter() - start})
        return result

    return timed


def _logged(run_name: str, function: Callable[P, R]) -> Callable[P, R]:
    """Write the beginning and the end of a stage to the leg's stage log. A stage is a task with a `services` parameter.

    Metrics of stages that belong to a leg and not to an iteration are written too: no manifest has them.
    """
    signature = inspect.signature(function)
    if SERVICES_PARAMETER not in signature.parameters:
        return function

    @functools.wraps(function)
    def logged(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        name = run_name.format(**arguments)
        with arguments[SERVICES_PARAMETER].stage_log.stage(name) as metrics:
            result = function(*args, **kwargs)
            # The metrics of a warm start, which has an Updated, are in the manifest of iteration 0.
            if isinstance(result, Receipt) and not isinstance(result, Updated) and iteration_in(name) is None:
                metrics |= result.metrics
            return result

    return logged
