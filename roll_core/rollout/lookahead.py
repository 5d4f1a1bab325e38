"""How far to work ahead of training: as far as is allowed while the trainer has to wait, and no farther than is of use.

Work that lies finished before it is needed could have been begun later, by newer weights. Work that comes too late leaves
the trainer idle, which costs more. So the lead grows at once and shrinks slowly, and never below one batch, which is
generated while the one before it is trained on.
"""

GROWTH = 0.5
"""Batches that the lead grows by when the trainer had to wait."""
SHRINKAGE = 0.25
"""Share of what was too early that the lead shrinks by."""
TOLERATED = 0.1
"""Share of the time between two batches that one may lie finished, or be waited for, without anything being changed."""


class Lookahead:
    """`lead` is how many batches may be under way beyond the one that is waited for: `most`, to begin with."""

    def __init__(self, most: float):
        self.lead = most
        self._most = most
        self._full_at: float | None = None
        self._taken_at: float | None = None

    def full(self, now: float) -> None:
        """The next batch can be taken."""
        if self._full_at is None:
            self._full_at = now

    def taken(self, now: float, is_full: bool) -> None:
        """A batch was; `is_full` says whether the one after it can be, too."""
        if self._taken_at is not None and self._full_at is not None and now > self._taken_at:
            interval = now - self._taken_at
            early = (now - self._full_at) / interval
            if early > TOLERATED:
                self.lead = max(min(1.0, self._most), self.lead - SHRINKAGE * early)
            elif self._full_at - self._taken_at > TOLERATED * interval:
                self.lead = min(self._most, self.lead + GROWTH)
        self._taken_at = now
        self._full_at = now if is_full else None
