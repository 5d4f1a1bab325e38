"""Errors that cross a boundary, each with one sentence a person can act on.

The command line prints the sentence and exits with the class's `exit_code`; nothing here is ever shown as a traceback.
`classify` says of these, and of any other exception, what is to be done about it.
"""

from enum import StrEnum


class FailureClass(StrEnum):
    """What a failure asks for."""

    TRANSIENT = "transient"
    """It passes by itself: try again."""
    DATA = "data"
    """It is about one sample: leave that out and count it."""
    DETERMINISTIC = "deterministic"
    """The same input fails the same way: stop, and say why."""


class RollError(Exception):
    """Something outside the code went wrong; the message says what and what to do."""

    exit_code = 1
    failure = FailureClass.DETERMINISTIC


class UserError(RollError, ValueError):
    """The user asked for something impossible: refused before anything starts, naming the key and the fix."""

    exit_code = 2


class ArtifactDamaged(RollError):
    """Stored bytes do not match the digest they are named by; they were not loaded."""


class StoreUnavailable(RollError, OSError):
    """The store did not answer for as long as the config lets requests be repeated; what was committed is there."""

    failure = FailureClass.TRANSIENT


class StoreRefused(RollError, OSError):
    """The store answered, and repeating the request would not change the answer."""


class IterationTaken(RollError):
    """Another writer committed this iteration first; this one must stop."""


class DeadlineExceeded(RollError):
    """Somebody named in the message did not answer in time."""

    failure = FailureClass.TRANSIENT


class RoleDied(RollError):
    """A role's process ended while it was needed."""

    failure = FailureClass.TRANSIENT


class NodeUnfit(RollError):
    """Nodes of a leg are not fit for roles. It is about them, not about the run: the next leg may do without them."""

    failure = FailureClass.TRANSIENT

    def __init__(self, reasons: dict[str, str]):
        """Example: NodeUnfit({"gpu-017": "/tmp has 0.2 GB left"})"""
        super().__init__("; ".join(f"node {node}: {reason}" for node, reason in reasons.items()))
        self.reasons = reasons

    def __reduce__(self):
        return (type(self), (self.reasons,))


class WrongWeights(RollError):
    """What an engine took over is not what the trainer published; it does not serve."""


class BroadcastBroken(RollError):
    """Somebody who takes part in broadcasting weights is gone or late; they can take another way."""

    failure = FailureClass.TRANSIENT


class SamplerMismatch(RollError):
    """Engines and trainer differ about tokens of the same weights, beyond training.mismatch; the policy did not move."""


class EngineDied(RollError):
    """What an engine generates with ended; the engine is of no use any more."""

    failure = FailureClass.TRANSIENT


class RewardUnavailable(RollError):
    """A service that grading needs does not answer. Says nothing about the trajectory, which is graded again."""

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
    """A leg ended without finishing the run; what was committed stays and can be resumed."""


class RegressionFound(RollError):
    """A reference run is worse than those that were accepted before it; the message says in what."""


ABOUT_THE_REQUEST = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of the operating system that asking again does not change."""


COLLECTIVES = ("gloo", "NCCL")
"""Libraries whose errors torch raises as plain RuntimeErrors."""


def classify(error: BaseException) -> FailureClass:
    """The class of any exception: ours say it themselves; without a class of its own, an error has that of its cause."""
    match error:
        case RollError():
            return error.failure
        case RuntimeError() if any(library in str(error) for library in COLLECTIVES):
            return FailureClass.TRANSIENT  # a peer that died or is late, as those see it who waited for it
        case OSError():  # refused and lost connections, timeouts, disks
            return FailureClass.DETERMINISTIC if isinstance(error, ABOUT_THE_REQUEST) else FailureClass.TRANSIENT
        case _:
            return FailureClass.DETERMINISTIC if error.__cause__ is None else classify(error.__cause__)


def one_line(error: BaseException) -> str:
    """What an exception comes down to. Those that crossed processes carry a traceback, whose last line it is."""
    if isinstance(error, RollError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if len(lines) > 1 else ": ".join([type(error).__name__, *lines])
