"""Traces of the attempts of an iteration: their times and fates. Timelines and simulations read them.

In-memory types (frozen dataclasses); `roll_core.store.records.traces` stores them as Parquet. Times are in seconds since the
epoch, by the clock of the rollout scheduler.
"""

from dataclasses import dataclass
from enum import StrEnum


class Fate(StrEnum):
    """Final state of an attempt."""

    TRAINED = "trained"
    """The attempt is part of the batch."""
    FILTERED = "filtered"
    """`rollout.filter` left out the attempt's group."""
    FAILED = "failed"
    """The attempt, or its group, could not be generated or graded."""
    ABORTED = "aborted"
    """The attempt was redundant: other attempts of its group, or other groups, finished first."""


@dataclass(frozen=True)
class Span:
    """Time that an attempt spent on one engine. An attempt has several spans if its engine died, or if it was interrupted.

    Example: Span(engine="engine 0", begin=1763200000.1, end=1763200002.4, num_tokens=96)
    """

    engine: str
    begin: float
    end: float
    num_tokens: int
    """Number of tokens that the engine generated and the attempt kept."""


@dataclass(frozen=True)
class AttemptTrace:
    """Trace of one attempt.

    Example: AttemptTrace(problem=97, attempt=2, fate=Fate.TRAINED, num_prompt_tokens=12, oldest_version=3,
    drawn_at=1763200000.0, spans=(Span(...),), grading_at=1763200002.5, graded_at=1763200002.7, consumed_at=1763200005.0)
    """

    problem: int
    """Index of the problem in the problem stream."""
    attempt: int
    """Number of the attempt within its group."""
    fate: Fate
    num_prompt_tokens: int
    oldest_version: int | None
    """Oldest weights version that generated a token of the attempt; None if it has no tokens."""
    drawn_at: float
    spans: tuple[Span, ...]
    grading_at: float | None
    graded_at: float | None
    consumed_at: float
    """Time when the batch of the attempt's iteration was complete."""

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(span.num_tokens for span in self.spans)
