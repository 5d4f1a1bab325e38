"""Adaptive lookahead: how many batches the rollout stream may work ahead of training. Used by `lifecycle.py`.

A batch that is finished long before it is needed could have been generated later, by newer weights. A batch that is late
leaves the trainer idle, which costs more. The lead therefore grows fast and shrinks slowly. It never falls below one batch
(or the configured maximum, if that is less): one batch is generated while the one before it is trained on.
"""

GROWTH = 0.5
"""Batches added to the lead when the trainer had to wait."""
SHRINKAGE = 0.25
"""Batches removed from the lead when a batch was early by a whole interval; in proportion if by less."""
TOLERANCE = 0.1
"""Share of the interval between two batches that a batch may be early or late without a change of the lead."""


class Lookahead:
    """Controller of `lead`: the batches that may be under way beyond the next one. It starts at `max_lead`."""

    def __init__(self, max_lead: float):
        self.lead = max_lead
        self._max_lead = max_lead
        self._ready_at: float | None = None
        self._taken_at: float | None = None

    def batch_ready(self, now: float) -> None:
        """Report that the next batch can be taken."""
        if self._ready_at is None:
            self._ready_at = now

    def batch_taken(self, now: float, is_full: bool) -> None:
        """Report that a batch was taken and adapt the lead; `is_full` says whether the batch after it can be taken, too."""
        if self._taken_at is not None and self._ready_at is not None and now > self._taken_at:
            interval = now - self._taken_at
            early = (now - self._ready_at) / interval
            if early > TOLERANCE:
                self.lead = max(min(1.0, self._max_lead), self.lead - SHRINKAGE * early)
            elif self._ready_at - self._taken_at > TOLERANCE * interval:
                self.lead = min(self._max_lead, self.lead + GROWTH)
        self._taken_at = now
        self._ready_at = now if is_full else None
