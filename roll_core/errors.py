"""Exceptions that cross a process or module boundary, each with a one-sentence message that a person can act on.

The command line prints the message, without a traceback, and exits with the class's `exit_code`. `classify` maps these and
all other exceptions to a failure class, which decides what happens next.
"""

from enum import StrEnum


class FailureClass(StrEnum):
    """Class of a failure, which decides how it is handled."""

    TRANSIENT = "transient"
    """The failure may pass by itself: retry."""
    DATA = "data"
    """The failure concerns one sample: exclude the sample and count it."""
    DETERMINISTIC = "deterministic"
    """The same input fails in the same way again: stop and report."""


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

    def __init__(self, sentence: str):
        super().__init__(shorten(sentence, LONGEST_SENTENCE))


class ArtifactDamaged(RollError):
    """Stored bytes do not match the digest that names them. They were not loaded."""


class StoreUnavailable(RollError, OSError):
    """The store did not respond for `store.retry_seconds`. Committed data is unaffected."""

    failure = FailureClass.TRANSIENT


class StoreRefused(RollError, OSError):
    """The store rejected a request, and a retry would be rejected too."""


class IterationTaken(RollError):
    """Another leg committed this iteration first, or holds the run's lease. This leg is fenced and must stop."""


class DeadlineExceeded(RollError):
    """A role or service, named in the message, did not reply in time."""

    failure = FailureClass.TRANSIENT


class RoleDied(RollError):
    """A role's process ended while it was needed."""

    failure = FailureClass.TRANSIENT


class NodeUnfit(RollError):
    """Nodes of a leg failed their health check. The next leg may get other nodes."""

    failure = FailureClass.TRANSIENT

    def __init__(self, reasons: dict[str, str]):
        """Name the unfit nodes, each with a reason. Example: NodeUnfit({"gpu-017": "/tmp has 0.2 GB left"})"""
        super().__init__("; ".join(f"node {node}: {reason}" for node, reason in reasons.items()))
        self.reasons = reasons

    def __reduce__(self):
        return (type(self), (self.reasons,))


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


COLLECTIVE_LIBRARIES = ("gloo", "NCCL")
"""Libraries whose errors torch raises as plain RuntimeErrors."""


def classify(error: BaseException) -> FailureClass:
    """Return the failure class of any exception.

    A RollError carries its class. Network and disk errors are transient. Other exceptions have the class of their
    `__cause__`, and are deterministic without one.
    """
    match error:
        case RollError():
            return error.failure
        case RuntimeError() if any(library in str(error) for library in COLLECTIVE_LIBRARIES):
            return FailureClass.TRANSIENT  # a collective operation failed because a peer is dead or late
        case OSError():  # refused and lost connections, timeouts, disks
            return FailureClass.DETERMINISTIC if isinstance(error, PERMANENT_OS_ERRORS) else FailureClass.TRANSIENT
        case _:
            return FailureClass.DETERMINISTIC if error.__cause__ is None else classify(error.__cause__)


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line: of several lines the last, which in a traceback from another process names
    the error."""
    if isinstance(error, RollError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if len(lines) > 1 else ": ".join([type(error).__name__, *lines])
