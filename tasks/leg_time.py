"""When a leg must stop: its allocation ends, or somebody asked it to make way. What is begun is committed first."""

import contextlib
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from roll_core.types.leg import LegEnding
from roll_core.types.manifest import Manifest

RECENT = 20
"""Iterations whose time says how long the next one may take."""
FAREWELL_S = 10.0
"""For what follows the last commit and checkpoint: roles and Ray end."""


class LegTime:
    """How much of a leg is left. Holds the times of recent iterations, of this leg and those before."""

    def __init__(self, ends_at: Callable[[], float], now: Callable[[], float] = time.time):
        self._ends_at = ends_at
        self._now = now
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._signal: signal.Signals | None = None

    def begin(self, chain: Sequence[Manifest]) -> None:
        """Take over what earlier legs know about how long an iteration takes."""
        self._recent.extend(manifest.timings["wall"] for manifest in chain[-RECENT:] if manifest.collected)

    def iterated(self, manifest: Manifest) -> None:
        self._recent.append(manifest.timings["wall"])

    def is_over(self, checkpoint_s: float) -> LegEnding | None:
        """Why no further iteration should begin; None if one may.

        By time: it would probably not be committed, and a checkpoint stored that takes so long, before the allocation ends.
        """
        if self._signal is not None:
            return LegEnding.PREEMPTED if self._signal is signal.SIGTERM else LegEnding.WALLTIME
        needed = slow(self._recent) + checkpoint_s + FAREWELL_S
        return LegEnding.WALLTIME if self._now() + needed > self._ends_at() else None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM and SIGUSR2 end the leg after the iteration it is at. To be called once Ray and Prefect have taken the
        handlers they want."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGUSR2)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _: object) -> None:
        self._signal = signal.Signals(number)


def slow(seconds: Sequence[float]) -> float:
    """So long that 19 of 20 are shorter; of none, nothing is known."""
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else max(seconds, default=0.0)
