"""Errors that cross a boundary, each with one sentence a person can act on.

The command line prints the sentence and exits with the class's `exit_code`; nothing here is ever shown as a traceback.
"""


class RollError(Exception):
    """Something outside the code went wrong; the message says what and what to do."""

    exit_code = 1


class UserError(RollError, ValueError):
    """The user asked for something impossible: refused before anything starts, naming the key and the fix."""

    exit_code = 2


class ArtifactDamaged(RollError):
    """Stored bytes do not match the digest they are named by; they were not loaded."""


class StoreUnavailable(RollError, OSError):
    """The store did not answer for as long as the config lets requests be repeated; what was committed is there."""


class StoreRefused(RollError, OSError):
    """The store answered, and repeating the request would not change the answer."""


class IterationTaken(RollError):
    """Another writer committed this iteration first; this one must stop."""


class DeadlineExceeded(RollError):
    """Somebody named in the message did not answer in time."""


class RoleDied(RollError):
    """A role's process ended while it was needed."""


class RewardError(RollError):
    """Grading failed. The trajectory is excluded and counted; it is never scored zero."""

    def __init__(self, reward: str, problem_id: str, cause: str):
        super().__init__(f"reward '{reward}' could not grade problem {problem_id}: {cause}")
        self.reward, self.problem_id, self.cause = reward, problem_id, cause

    def __reduce__(self):
        return (type(self), (self.reward, self.problem_id, self.cause))


class LegFailed(RollError):
    """A leg ended without finishing the run; what was committed stays and can be resumed."""
