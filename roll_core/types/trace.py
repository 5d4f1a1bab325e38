"""What happened to every attempt of an iteration, and when: what timelines are drawn from and simulations are fed with.

In memory only (frozen dataclasses); `roll_core.store.records.traces` writes and reads them as Parquet. Times are seconds since the
epoch, by the clock of the rollout scheduler.
"""

from dataclasses import dataclass
from enum import StrEnum


class Fate(StrEnum):
    """What an attempt came to, in the end."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Its group was left out by rollout.filter."""
    FAILED = "failed"
    """It could not be generated or graded, or its group could not."""
    ABORTED = "aborted"
    """It was redundant: others of its group, or other groups, were there first."""


@dataclass(frozen=True)
class Span:
    """An attempt's time with one engine. It has several if an engine died over it or if it was interrupted and resumed.

    Example: Span(engine="engine 0", begin=1763200000.1, end=1763200002.4, num_tokens=96)
    """

    engine: str
    begin: float
    end: float
    num_tokens: int
    """Generated there, and kept."""


@dataclass(frozen=True)
class AttemptTrace:
    """Example: AttemptTrace(problem=97, attempt=2, fate=Fate.TRAINED, num_prompt_tokens=12, oldest_version=3,
    drawn_at=1763200000.0, spans=(Span(...),), grading_at=1763200002.5, graded_at=1763200002.7, consumed_at=1763200005.0)
    """

    problem: int
    """Its place in the stream of problems."""
    attempt: int
    fate: Fate
    num_prompt_tokens: int
    oldest_version: int | None
    """Of the weights that generated its tokens; None if it has none."""
    drawn_at: float
    spans: tuple[Span, ...]
    grading_at: float | None
    graded_at: float | None
    consumed_at: float
    """When its iteration got its batch."""

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)
