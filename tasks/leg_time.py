"""Time left to a leg. Used by `flows/train_leg.py` to decide whether another iteration may begin.

A leg whose walltime is nearly up stops after a commit. A leg that is signalled leaves a collect, a prepare or an evaluation
at once; an update that has begun is committed first.
"""

import contextlib
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from roll_core.types.leg import LegEnding
from roll_core.types.manifest import Manifest

RECENT = 20
"""Number of recent iterations from which the duration of the next one is estimated."""
SHUTDOWN_S = 10.0
"""Seconds reserved for the shutdown of roles and Ray, after the last commit and checkpoint."""


class LegTime:
    """Stop condition of a leg, from its end time, its signals, and the durations of recent iterations of all legs."""

    def __init__(self, ends_at: Callable[[], float], now: Callable[[], float] = time.time):
        """Track a leg whose allocation ends at `ends_at()`, in seconds since the epoch, as `now()` is."""
        self._ends_at = ends_at
        self._now = now
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._signal: signal.Signals | None = None

    def load_history(self, chain: Sequence[Manifest]) -> None:
        """Take the durations of the last `RECENT` committed iterations of a run as the estimate of the next one's."""
        self._recent.extend(manifest.timings["wall"] for manifest in chain[-RECENT:] if manifest.collected)

    def record_iteration(self, manifest: Manifest) -> None:
        """Record the duration of an iteration that was just committed."""
        self._recent.append(manifest.timings["wall"])

    def stop_reason(self, checkpoint_s: float) -> LegEnding | None:
        """Return why no further iteration should begin: PREEMPTED, WALLTIME, or None if one may begin.

        WALLTIME if the time left is less than the 95th percentile of recent iterations, plus `checkpoint_s` seconds to store
        a checkpoint, plus SHUTDOWN_S. A signal also stops the leg: SIGTERM means PREEMPTED, SIGUSR2 WALLTIME.
        """
        if self._signal is not None:
            return LegEnding.PREEMPTED if self._signal is signal.SIGTERM else LegEnding.WALLTIME
        needed = p95(self._recent) + checkpoint_s + SHUTDOWN_S
        return LegEnding.WALLTIME if self._now() + needed > self._ends_at() else None

    def is_told_to_stop(self) -> bool:
        """True if the leg received SIGTERM or SIGUSR2: it may be killed soon."""
        return self._signal is not None

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGUSR2 during the block: `stop_reason` reports them.

        Enter it after Ray and Prefect have installed their own signal handlers, which this replaces.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGUSR2)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        self._signal = signal.Signals(number)


def p95(seconds: Sequence[float]) -> float:
    """95th percentile of some durations in seconds; 0 if there are none."""
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else max(seconds, default=0.0)
