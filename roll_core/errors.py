"""Exceptions that cross a process or module boundary, each with a one-sentence message that a person can act on.

The command line prints the message, without a traceback, and exits with the class's `exit_code`. `classify` maps these and
all other exceptions to a failure class, which decides what happens next.
"""

from enum import StrEnum
from typing import Any


class FailureClass(StrEnum):
    """Class of a failure, which decides how it is handled."""

    TRANSIENT = "transient"
    """The failure may pass by itself: retry."""
    DATA = "data"
    """The failure concerns one sample: exclude the sample and count it."""
    DETERMINISTIC = "deterministic"
    """The same input may fail in the same way again: stop and report if it does."""
    MISTAKE = "mistake"
    """The user must change something first: stop and report at once."""


LONGEST_SENTENCE = 1200
"""Longest message of a `UserError`, in characters. A sentence may repeat a value that is a page long."""


def shorten(text: str, longest: int) -> str:
    """Return a text in one line of printable characters; the middle of one that is longer than `longest` is left out."""
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    if len(line) <= longest:
        return line
    half = (longest - len(" ... ")) // 2
    return f"{line[:half]} ... {line[-half:]}"


class RollError(Exception):
    """Base of our exceptions: something outside the code went wrong. The message says what happened and what to do."""

    exit_code = 1
    """Exit code of a command that ends with this error."""
    failure = FailureClass.DETERMINISTIC


class UserError(RollError, ValueError):
    """Mistake of the user, refused before anything starts. The message names the config key and a fix, in one line."""

    exit_code = 2
    failure = FailureClass.MISTAKE

    def __init__(self, sentence: str):
        super().__init__(shorten(sentence, LONGEST_SENTENCE))


class ArtifactDamaged(RollError):
    """Stored bytes do not match the digest that names them. They were not loaded."""


class StoreUnavailable(RollError, OSError):
    """The store did not respond for `store.retry_seconds`. Committed data is unaffected."""

    failure = FailureClass.TRANSIENT


class StoreRefused(RollError, OSError):
    """The store rejected a request, and a retry would be rejected too."""


class PrefectUnavailable(RollError):
    """The Prefect server refused a request or could not be reached, although the request was repeated."""

    failure = FailureClass.TRANSIENT


class IterationTaken(RollError):
    """Another leg committed this iteration first, or holds the run's lease. This leg is fenced and must stop."""


class DeadlineExceeded(RollError):
    """A role or service, named in the message, did not reply in time."""

    failure = FailureClass.TRANSIENT


class RoleDied(RollError):
    """A role's process ended while it was needed."""

    failure = FailureClass.TRANSIENT


class LegInterrupted(RollError):
    """The leg was told to stop, by SIGTERM or SIGUSR2, and left a stage. What the stage had finished is kept."""

    failure = FailureClass.TRANSIENT


class NodeUnfit(RollError):
    """Nodes of a leg cannot be used. The failure counts against them, and the next leg may get others."""

    failure = FailureClass.TRANSIENT

    def __init__(self, reasons: dict[str, str]):
        """Name the unfit nodes, each with a reason. Example: NodeUnfit({"gpu-017": "/tmp has 0.2 GB left"})"""
        super().__init__("; ".join(f"node {node}: {reason}" for node, reason in reasons.items()))
        self.reasons = reasons

    def __reduce__(self):
        return (type(self), (self.reasons,))


class DeviceFault(NodeUnfit):
    """A GPU failed in the middle of its work. The message names its node and the GPU."""


class WrongWeights(RollError):
    """An engine's weights differ from those that the trainer published. The engine does not serve."""


class BroadcastBroken(RollError):
    """A participant in a broadcast of weights is dead or late. The weights can use another transport."""

    failure = FailureClass.TRANSIENT


class SamplerMismatch(RollError):
    """Logprobs of trainer and sampler mismatch beyond the limits of `training.mismatch`. The policy was not updated."""


class EngineDied(RollError):
    """The generating process of an engine ended. The engine must be replaced."""

    failure = FailureClass.TRANSIENT


class RewardUnavailable(RollError):
    """A service that grading needs is down. The trajectory is not at fault and is graded again."""

    failure = FailureClass.TRANSIENT


class RewardError(RollError):
    """Grading failed. The trajectory is excluded and counted; it is never scored zero."""

    failure = FailureClass.DATA

    def __init__(self, reward: str, problem_id: str, cause: str):
        super().__init__(f"reward '{reward}' could not grade problem {problem_id}: {cause}")
        self.reward, self.problem_id, self.cause = reward, problem_id, cause

    def __reduce__(self):
        return (type(self), (self.reward, self.problem_id, self.cause))


class LegFailed(RollError):
    """A run stopped before its last iteration, because of how its last leg ended. The run can be resumed."""


class RegressionFound(RollError):
    """A reference run is worse than the accepted runs before it. The message names the quantities."""


PERMANENT_OS_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""OSError subclasses that a retry does not change."""

# Types of torch, Ray and httpx are known by their names: the control plane does not import these libraries for a comparison.
RAY_TASK_ERROR = "ray.exceptions.RayTaskError"
"""Exception that Ray raises for an exception of a role. Its `cause` is that exception, and its text is a traceback."""
RAY_ERROR = "ray.exceptions.RayError"
CARRIERS = {RAY_ERROR, "ray.exceptions.UserCodeException", "ray.exceptions.UnserializableException"}
"""Types that carry an exception of a role as text only, because it could not be pickled."""
TRANSIENT_TYPES = {
    RAY_ERROR,
    "torch.AcceleratorError",
    "torch.distributed.DistError",
    "httpx.TransportError",
    "aiohttp.client_exceptions.ClientConnectionError",
}
"""Types of failures of machines and networks, each with all of its subclasses."""
HTTP_STATUS_ERROR = "httpx.HTTPStatusError"
"""Response with an error status, also by Prefect's server (PrefectHTTPStatusError)."""
PASSING_STATUSES = {408, 425, 429}
"""HTTP statuses below 500 that blame the moment and not the request."""
PASSING_MESSAGES = (
    *("gloo", "NCCL"),  # a collective failed because a peer is dead or late
    *("CUDA error", "CUDNN_STATUS_", "CUBLAS_STATUS_"),
    "EADDRINUSE",  # another process took a port between its choice and its use
    "timed out during startup",  # Ray, on a busy machine
)
"""Parts of messages of transient failures that are raised as plain RuntimeErrors or Exceptions."""
PROGRAM_ERRORS = ("device-side assert", "no kernel image is available")
"""Parts of messages of GPU errors that the program causes: the same kernel fails on every GPU."""
DEVICE_FAULTS = (
    "ECC error",
    "NVLink error",
    "hardware",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "unspecified launch failure",
    "busy or unavailable",
    "CUDA error: unknown error",
)
"""Parts of messages of CUDA errors that a broken GPU causes. A defect of a kernel can cause some of them, too."""


def classify(error: BaseException) -> FailureClass:
    """Return the failure class of any exception.

    A RollError carries its class. Other exceptions are classed by their type, then by their own message, then by their
    `__cause__`; without one they are deterministic. The text of a traceback never counts.
    """
    error = origin(error)
    if isinstance(error, RollError):
        return error.failure
    if isinstance(error, PERMANENT_OS_ERRORS) or (isinstance(error, RuntimeError) and _mentions(error, PROGRAM_ERRORS)):
        return FailureClass.DETERMINISTIC
    if _is_transient_type(error) or _has_passing_message(error):
        return FailureClass.TRANSIENT
    return FailureClass.DETERMINISTIC if error.__cause__ is None else classify(error.__cause__)


def origin(error: BaseException) -> BaseException:
    """Return the exception that a role raised, without the RayTaskErrors around it; any other exception as it is."""
    while RAY_TASK_ERROR in _type_names(error):
        carrier: Any = error
        error = carrier.cause
    return error


def is_device_fault(error: BaseException) -> bool:
    """True for a CUDA error that a broken GPU causes, such as an uncorrectable ECC error."""
    return isinstance(error, RuntimeError) and _mentions(error, ("CUDA error",)) and _mentions(error, DEVICE_FAULTS)


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message. For Ray's exceptions, whose messages end with the
    traceback of another process, return the last line, which names the error there."""
    error = origin(error)
    if isinstance(error, RollError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and RAY_ERROR in _type_names(error):
        return lines[-1]
    return ": ".join([type(error).__name__, *lines[:1]])


def _is_transient_type(error: BaseException) -> bool:
    names = _type_names(error)
    if names[0] in CARRIERS:
        return False
    if HTTP_STATUS_ERROR in names:
        answered: Any = error
        return answered.response.status_code >= 500 or answered.response.status_code in PASSING_STATUSES
    return isinstance(error, OSError | MemoryError) or not TRANSIENT_TYPES.isdisjoint(names)


def _has_passing_message(error: BaseException) -> bool:
    return (isinstance(error, RuntimeError) or type(error) is Exception) and _mentions(error, PASSING_MESSAGES)


def _mentions(error: BaseException, parts: tuple[str, ...]) -> bool:
    message = str(error)
    return any(part in message for part in parts)


def _type_names(error: BaseException) -> list[str]:
    """Qualified names of an exception's class and its base classes. Example: ["ray.exceptions.RaySystemError", ...]"""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
