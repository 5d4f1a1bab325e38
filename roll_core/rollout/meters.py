"""Time-weighted meters of a stream: requests at each engine, attempts in the queue and at graders, groups in the buffer."""

from dataclasses import dataclass

from roll_core.types.manifest import Metrics


@dataclass(frozen=True)
class MeterReading:
    """Time-weighted mean, peak and busy share of a meter.

    Example: MeterReading(mean=3.2, peak=8.0, busy_share=0.9)
    """

    mean: float
    peak: float
    busy_share: float
    """Share of the time in which the value was above zero."""


class Meter:
    """Meter of a quantity that changes in steps; integrates it over time.

    Example: meter = Meter(now=0.0); meter.set(4, now=1.0); meter.read(now=2.0) # MeterReading(2.0, 4.0, 0.5)
    """

    def __init__(self, now: float):
        self._value = self._peak = 0.0
        self._since = now
        self._begin(now)

    def set(self, value: float, now: float) -> None:
        """Record that the quantity has this value from `now` on."""
        self._area += self._value * (now - self._since)
        self._busy += (now - self._since) if self._value else 0.0
        self._value, self._since, self._peak = value, now, max(self._peak, value)

    def read(self, now: float) -> MeterReading:
        """Return the reading since the last read, and restart."""
        self.set(self._value, now)
        seconds = now - self._began
        reading = (
            MeterReading(self._area / seconds, self._peak, self._busy / seconds)
            if seconds > 0
            else MeterReading(0.0, 0.0, 0.0)
        )
        self._begin(now)
        return reading

    def _begin(self, now: float) -> None:
        self._began, self._area, self._busy, self._peak = now, 0.0, 0.0, self._value


class Meters:
    """Meters of one stream, read as metrics of the time between two batches."""

    def __init__(self, engines: list[str], num_slots: int, now: float):
        self._num_slots = num_slots
        self._engines = {name: Meter(now) for name in engines}
        self._alive = set(engines)
        self._queue, self._graders, self._buffer = Meter(now), Meter(now), Meter(now)

    def set(self, load: dict[str, int], queued: int, at_graders: int, buffered: int, now: float) -> None:
        """Record the state of the stream. `load` has the requests at each living engine."""
        self._alive = set(load)
        for name in self._engines.keys() | self._alive:
            self._engines.setdefault(name, Meter(now)).set(load.get(name, 0), now)
        self._queue.set(queued, now)
        self._graders.set(at_graders, now)
        self._buffer.set(buffered, now)

    def read(self, now: float) -> Metrics:
        """Return the metrics since the last read. Meters of dead engines are dropped afterwards."""
        engines = [meter.read(now) for meter in self._engines.values()]
        self._engines = {name: meter for name, meter in self._engines.items() if name in self._alive}
        queue, graders, buffer = self._queue.read(now), self._graders.read(now), self._buffer.read(now)
        return {
            "engine/busy": _mean([engine.busy_share for engine in engines]),
            "engine/busy_least": min((engine.busy_share for engine in engines), default=0.0),
            "engine/requests": _mean([engine.mean for engine in engines]),
            "engine/occupancy": _mean([min(1.0, engine.mean / self._num_slots) for engine in engines]),
            "rollout/engines": float(len(self._alive)),
            "grader/busy": graders.busy_share,
            "grader/attempts": graders.mean,
            "rollout/queue_mean": queue.mean,
            "rollout/queue_peak": queue.peak,
            "rollout/buffer_mean": buffer.mean,
            "rollout/buffer_peak": buffer.peak,
        }


def _mean(values: list[float]) -> float:
    """Mean; 0 for an empty list."""
    return sum(values) / max(1, len(values))
