"""Failures: their classes, the backoff before a retry, and whether another leg follows."""

import errno
from types import SimpleNamespace

import httpx
import prefect.exceptions
import pytest
import ray.exceptions
import torch

from flows.rlvr import reason_to_stop
from infra.slurm.queue import SlurmUnavailable
from roll_core.config.operations.legs import LegsConfig
from roll_core.config.operations.services import RetriesConfig
from roll_core.errors import (
    ArtifactDamaged,
    DeadlineExceeded,
    FailureClass,
    IterationTaken,
    RewardError,
    RewardUnavailable,
    RoleDied,
    RollError,
    StoreRefused,
    StoreUnavailable,
    UserError,
    classify,
    one_line,
)
from roll_core.reporting.stage_log import StageLog
from roll_core.retries import backoff_delays
from roll_core.types.leg import LegEnded, LegEnding
from roll_core.types.manifest import Receipt
from tasks.durability import pure

RETRY_AT_ONCE = RetriesConfig(repeats=2, first_delay_seconds=1e-6)


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def in_role(error: Exception, traceback: str = "Traceback (most recent call last):") -> Exception:
    """Exception of a role, as Ray raises it in the driver: its text is a whole traceback."""
    text = f"{traceback}\n{type(error).__name__}: {error}"
    return ray.exceptions.RayTaskError("update", text, error).as_instanceof_cause()


def http_error(kind: type[httpx.HTTPStatusError], status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://localhost:4200/api/flow_runs/")
    return kind(f"Server error '{status}'", request=request, response=httpx.Response(status, request=request))


ECC = (
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some other call"
)
PORT_TAKEN = (
    "The server socket has failed to listen. port: 41234, code: -98, name: EADDRINUSE, message: address already in use"
)


# -------------------------------------------------------------------------------------------------- classes
@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("s3"),
        DeadlineExceeded("late"),
        RoleDied("dead"),
        RewardUnavailable("judge"),
        OSError("disk"),
        ConnectionRefusedError(),
        TimeoutError(),
        with_cause(RuntimeError("request failed"), ConnectionResetError()),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        MemoryError(),
        OSError(errno.EADDRINUSE, "Address already in use"),
        torch.AcceleratorError(ECC),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        in_role(torch.AcceleratorError(ECC)),
        torch.distributed.DistBackendError("a peer is gone"),
        torch.distributed.DistNetworkError(PORT_TAKEN),
        torch.distributed.DistStoreError("wait timeout after 300000ms"),
        RuntimeError(PORT_TAKEN),
        ray.exceptions.RaySystemError("the object store is full"),
        ray.exceptions.NodeDiedError("n3"),
        ray.exceptions.ActorUnavailableError("a network blink", None),
        in_role(ray.exceptions.ObjectLostError("f" * 56, None, "")),
        Exception("The current node timed out during startup. This could happen because of a busy machine."),
        http_error(prefect.exceptions.PrefectHTTPStatusError, 503),
        http_error(httpx.HTTPStatusError, 429),
        httpx.ReadError("closed"),
        SlurmUnavailable("squeue: Unable to contact slurm controller"),
    ],
    ids=lambda error: repr(error)[:60],
)
def test_failures_that_can_pass_by_themselves_are_transient(error):
    assert classify(error) is FailureClass.TRANSIENT


@pytest.mark.parametrize(
    "error",
    [
        ValueError("nan"),
        AssertionError(),
        ArtifactDamaged("cut"),
        StoreRefused("no such bucket"),
        IterationTaken("4"),
        RollError("every trajectory failed"),
        FileNotFoundError("model"),
        PermissionError(),
        with_cause(ValueError("bad"), KeyError("x")),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        http_error(prefect.exceptions.PrefectHTTPStatusError, 404),
        ValueError("backend must be gloo or NCCL"),
    ],
    ids=repr,
)
def test_failures_that_repeat_on_the_same_input_are_deterministic(error):
    assert classify(error) is FailureClass.DETERMINISTIC


@pytest.mark.parametrize("error", [RuntimeError("loss is not finite"), KeyError("x")])
def test_the_text_of_a_traceback_does_not_make_a_failure_transient(error):
    shown = in_role(
        error, "Traceback:\n  File 'x', in start\n    init_process_group('cpu:gloo,cuda:nccl')  # NCCL, CUDA error"
    )
    assert "gloo" in str(shown)
    assert classify(shown) is FailureClass.DETERMINISTIC


def test_an_exception_that_could_not_be_pickled_has_no_class_by_its_carrier():
    class Unpicklable(Exception):
        def __reduce__(self):
            raise TypeError("cannot be pickled")

    shown = ray.exceptions.RayTaskError("update", "Traceback:\n gloo\nUnpicklable: nan", Unpicklable("nan"))
    assert classify(shown) is FailureClass.DETERMINISTIC
    assert one_line(shown) == "Unpicklable: nan"


def test_a_mistake_of_the_user_is_one_whatever_its_cause_and_wherever_it_is_found():
    assert classify(with_cause(UserError("no such file"), TimeoutError())) is FailureClass.MISTAKE
    assert classify(in_role(UserError("model: no such position"))) is FailureClass.MISTAKE


def test_a_reward_error_is_a_data_failure_whatever_its_cause():
    assert classify(with_cause(RewardError("math", "p/1", "no answer"), TimeoutError())) is FailureClass.DATA


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("nan in step 3"), "ValueError: nan in step 3"),
        (in_role(ValueError("nan in step 3")), "ValueError: nan in step 3"),
        (in_role(RoleDied("engine 0 died")), "engine 0 died"),
        (torch.AcceleratorError(ECC), "AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
        (AssertionError(), "AssertionError"),
        (RoleDied("engine 0 died"), "engine 0 died"),
    ],
)
def test_an_exception_is_summarised_in_one_line(error, line):
    assert one_line(error) == line


# -------------------------------------------------------------------------------------------------- retries
def test_backoff_delays_double_up_to_the_longest_and_jitter_shortens_them_by_half_at_most():
    retries = RetriesConfig(repeats=6, first_delay_seconds=1.0, longest_delay_seconds=10.0)
    drawn = [backoff_delays(retries) for _ in range(200)]
    for delays, longest in zip(zip(*drawn, strict=True), [1.0, 2.0, 4.0, 8.0, 10.0, 10.0], strict=True):
        assert 0.5 * longest <= min(delays) < 0.6 * longest, "pauses are not spread down to half"
        assert 0.9 * longest < max(delays) <= longest
    assert backoff_delays(RetriesConfig(repeats=0)) == []
    assert max(backoff_delays(RetriesConfig(repeats=2000))) <= 30.0


def pure_task(failures: list[Exception]):
    """PURE task that raises the given failures, one per call, and then returns its number; and the list of its calls."""
    calls: list[int] = []

    def stage(number: int, services: SimpleNamespace) -> Receipt:
        calls.append(number)
        if failures:
            raise failures.pop(0)
        return Receipt(metrics={"number": number})

    return pure("stage")(stage).fn, calls


@pytest.fixture
def services(tmp_path) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(retries=RETRY_AT_ONCE), stage_log=StageLog(tmp_path))


def test_a_pure_task_is_repeated_while_the_failure_is_transient(services):
    stage, calls = pure_task([ConnectionResetError(), TimeoutError()])
    assert stage(7, services=services).metrics == {"number": 7}
    assert calls == [7, 7, 7]


def test_a_pure_task_gives_up_after_the_repeats_of_the_config(services):
    stage, calls = pure_task([OSError(str(n)) for n in range(9)])
    with pytest.raises(OSError, match="2"):
        stage(7, services)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "error", [ValueError("nan"), RoleDied("gone"), DeadlineExceeded("late"), StoreUnavailable("waited"), UserError("key")]
)
def test_a_pure_task_is_not_repeated_if_that_cannot_help_or_the_failure_was_retried_already(services, error):
    stage, calls = pure_task([error])
    with pytest.raises(type(error)):
        stage(7, services)
    assert len(calls) == 1


# -------------------------------------------------------------------------------------------------- legs
def ended(leg: int, last_iteration: int, failure: FailureClass, cause: str = "ValueError: nan") -> LegEnded:
    return LegEnded(
        run_id="tiny-1",
        leg=leg,
        ending=LegEnding.FAILED,
        last_iteration=last_iteration,
        cause=cause,
        failure=failure,
        log=f"leg-{leg}/log",
    )


DETERMINISTIC, TRANSIENT = FailureClass.DETERMINISTIC, FailureClass.TRANSIENT


def test_the_same_deterministic_failure_at_the_same_iteration_stops_the_run_at_the_second_leg():
    reason = reason_to_stop([ended(1, 3, DETERMINISTIC), ended(2, 3, DETERMINISTIC)], LegsConfig(max_failures=9))
    assert reason == (
        "tiny-1 stopped at iteration 3: two legs in a row failed in the same way: ValueError: nan (log: leg-2/log)"
    )


@pytest.mark.parametrize(
    "endings",
    [
        [ended(1, 3, DETERMINISTIC)],
        [ended(1, 3, TRANSIENT), ended(2, 3, TRANSIENT)],
        [ended(1, 3, DETERMINISTIC), ended(2, 4, DETERMINISTIC)],
        [ended(1, 3, DETERMINISTIC), ended(2, 3, DETERMINISTIC, "KeyError: 'x'")],
        [ended(1, 3, DETERMINISTIC), ended(2, 3, TRANSIENT, "engine 0 died"), ended(3, 3, DETERMINISTIC)],
    ],
    ids=["once", "transient", "another iteration", "another cause", "another leg between"],
)
def test_another_leg_follows_unless_the_same_failure_repeats(endings):
    assert reason_to_stop(endings, LegsConfig(max_failures=9)) is None


def test_failed_legs_are_counted_from_the_last_commit_on():
    stuck = [ended(1, -1, TRANSIENT, "engine 0 died"), ended(2, -1, TRANSIENT, "engine 0 died")]
    assert reason_to_stop(stuck, LegsConfig(max_failures=2)) is None
    assert reason_to_stop([*stuck, ended(3, 0, TRANSIENT)], LegsConfig(max_failures=2)) is None
    assert reason_to_stop([*stuck, ended(3, -1, TRANSIENT, "late")], LegsConfig(max_failures=2)) == (
        "tiny-1 stopped before its first commit after 3 failed leg(s); the last one: late (log: leg-3/log)"
    )


def test_a_run_that_may_not_fail_stops_at_the_first_failure():
    assert reason_to_stop([ended(1, 3, TRANSIENT)], LegsConfig(max_failures=0)) is not None
