"""Activity of trainer, engines and graders over time: step functions from stage logs and attempt traces, and a summary.

Pure functions. `timeline.py` draws the step functions; the simulator compares its predictions with the summary.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.types.trace import AttemptTrace, Fate

Interval = tuple[float, float]
"""Begin and end, in seconds since the epoch."""
MAX_CLOCK_SKEW_S = 0.1
"""Largest tolerated skew, in seconds, between the clocks of driver and rollout scheduler; iterations are longer."""
TRAINING = ("prepare", "update_critic", "update")
"""Stages in which the trainer computes; in all others it waits."""


@dataclass(frozen=True)
class StepFunction:
    """Step function of time: `levels[i]` holds from `times[i]` to `times[i + 1]`. Before the first time it is 0.

    Example: StepFunction(times=[0.0, 1.0, 3.0], levels=[2.0, 1.0, 0.0]) counts two things for a second, then one for two.
    """

    times: NDArray[np.float64]
    levels: NDArray[np.float64]

    @property
    def peak(self) -> int:
        """Highest level."""
        return int(self.levels.max())

    def mean(self, window: Interval) -> float:
        """Time-weighted mean level in a window; 0 if the window is empty."""
        begin, end = window
        return float(self.area(np.array([begin]), np.array([end]))[0]) / (end - begin) if end > begin else 0.0

    def area(self, begins: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
        """Integral of the level, in level times seconds, from each begin to its end."""
        until = np.concatenate([[0.0], np.cumsum(self.levels[:-1] * np.diff(self.times))])
        return np.interp(ends, self.times, until) - np.interp(begins, self.times, until)

    def downsampled(self, window: Interval, num_columns: int) -> "StepFunction":
        """Return the means over `num_columns` columns of equal width: the same area in fewer steps."""
        edges = np.linspace(*window, num_columns + 1)
        return StepFunction(edges, np.append(self.area(edges[:-1], edges[1:]) / np.diff(edges), 0.0))

    def busy(self) -> "StepFunction":
        """Step function that is 1 where this one is above 0, else 0."""
        return StepFunction(self.times, (self.levels > 0).astype(float))


def count_over_time(intervals: Iterable[Interval]) -> StepFunction:
    """Count the open intervals at every time."""
    begins_and_ends = np.array([(begin, end) for begin, end in intervals if end > begin]).reshape(-1, 2)
    if not len(begins_and_ends):
        return StepFunction(np.zeros(1), np.zeros(1))
    times, places = np.unique(begins_and_ends, return_inverse=True)
    begun, ended = (np.bincount(column, minlength=len(times)) for column in places.reshape(-1, 2).T)
    return StepFunction(times, np.cumsum(begun - ended).astype(float))


# -------------------------------------------------------------------------------------------------- intervals
@dataclass(frozen=True)
class StageSpan:
    """Stage from begin to end, in seconds since the epoch.

    Example: StageSpan(stage="update", name="update 3", iteration=3, begin=1763200005.1, end=1763200006.4)
    """

    stage: str
    name: str
    iteration: int | None
    begin: float
    end: float


def stage_spans(events: Sequence[StageEvent]) -> list[StageSpan]:
    """Pair the begin and end events of stages, sorted by begin. A stage that was cut short has no end and is left out."""
    begun: dict[str, StageEvent] = {}
    spans = []
    for event in events:
        if event.edge is Edge.BEGIN:
            begun[event.name] = event
        elif event.name in begun:
            begin = begun.pop(event.name).at.timestamp()
            spans.append(StageSpan(event.stage, event.name, event.iteration, begin, event.at.timestamp()))
    return sorted(spans, key=lambda span: span.begin)


def iterations_of(spans: Sequence[StageSpan]) -> dict[int, Interval]:
    """Interval of each iteration, by number: from the begin of its first stage to the end of its last."""
    intervals: dict[int, Interval] = {}
    for span in spans:
        if span.iteration is not None:
            begin, end = intervals.get(span.iteration, (span.begin, span.end))
            intervals[span.iteration] = (min(begin, span.begin), max(end, span.end))
    return dict(sorted(intervals.items()))


def queue_intervals(trace: AttemptTrace) -> list[Interval]:
    """Intervals in which an attempt waits for an engine: before its first one, and between two of them."""
    ends = [trace.drawn_at, *(span.end for span in trace.spans)]
    begins = [*(span.begin for span in trace.spans)]
    if not begins:
        return [(trace.drawn_at, trace.consumed_at)]
    return list(zip(ends[:-1], begins, strict=True))


def grading_intervals(traces: Iterable[AttemptTrace]) -> list[Interval]:
    """Intervals in which attempts are graded; one without a grade ends when its iteration got its batch."""
    return [
        (trace.grading_at, trace.graded_at if trace.graded_at is not None else trace.consumed_at)
        for trace in traces
        if trace.grading_at is not None
    ]


def ready_group_intervals(traces: Iterable[AttemptTrace]) -> list[Interval]:
    """Interval of each trained group in the buffer: from its last grade until its iteration got its batch."""
    complete: dict[int, Interval] = {}
    for trace in traces:
        if trace.fate is Fate.TRAINED and trace.graded_at is not None:
            graded_at, _ = complete.get(trace.problem, (trace.graded_at, 0.0))
            complete[trace.problem] = (max(graded_at, trace.graded_at), trace.consumed_at)
    return list(complete.values())


def engine_intervals(traces: Iterable[AttemptTrace]) -> dict[str, list[Interval]]:
    """Intervals of attempts on each engine, sorted by engine name (engine 2 before engine 10)."""
    intervals: dict[str, list[Interval]] = {}
    for trace in traces:
        for span in trace.spans:
            intervals.setdefault(span.engine, []).append((span.begin, span.end))
    return dict(sorted(intervals.items(), key=lambda named: (len(named[0]), named[0])))


# -------------------------------------------------------------------------------------------------- summary
@dataclass(frozen=True)
class Percentiles:
    """Median, 90th and 99th percentile. Example: Percentiles(p50=1.2, p90=4.0, p99=9.7)"""

    p50: float
    p90: float
    p99: float


def percentiles(values: Sequence[float]) -> Percentiles:
    """Compute p50, p90 and p99 of values; all 0 if there are none."""
    return Percentiles(*(float(p) for p in np.percentile(values, [50, 90, 99]))) if len(values) else Percentiles(0, 0, 0)


@dataclass(frozen=True)
class Activity:
    """Summary of some iterations. Shares are fractions of the time from the begin of the first to the end of the last."""

    num_iterations: int
    iteration_seconds: float
    """Mean seconds per iteration."""
    stage_seconds: dict[str, float]
    """Mean seconds per iteration, by stage."""
    trainer_busy: float
    """Share of time in which the trainer computes."""
    engines_busy: float
    """Share of time in which an engine runs at least one attempt, mean over engines."""
    mean_running: float
    """Mean number of attempts running at once per engine."""
    attempt_seconds: Percentiles
    """Seconds from the begin of an attempt's first engine span to the end of its last; without aborted attempts."""
    attempt_tokens: Percentiles
    """Tokens generated per attempt, without aborted attempts."""
    num_tokens: int
    """Tokens generated by all attempts."""
    wasted_tokens: dict[Fate, int]
    """Tokens of attempts that were not trained on, by fate."""
    staleness: Percentiles | None
    """Weights versions between an attempt's oldest token and its update; None if the iterations are unknown."""

    @property
    def bubble(self) -> float:
        """Share of time in which the trainer is idle."""
        return 1.0 - self.trainer_busy


def summarise(spans: Sequence[StageSpan], traces: Sequence[AttemptTrace]) -> Activity:
    """Summarise the iterations from 1 on; without stages, the time window is that of the traces."""
    iterations = {number: interval for number, interval in iterations_of(spans).items() if number > 0}
    window = _window(list(iterations.values()), traces)
    inside = [span for span in spans if span.iteration in iterations]
    stage_seconds: dict[str, float] = {}
    for span in inside:
        stage_seconds[span.stage] = stage_seconds.get(span.stage, 0.0) + (span.end - span.begin) / len(iterations)
    training = count_over_time((span.begin, span.end) for span in inside if span.stage in TRAINING)
    engines = [count_over_time(intervals) for intervals in engine_intervals(traces).values()]
    ended = [trace for trace in traces if trace.fate is not Fate.ABORTED and trace.spans]
    wasted: dict[Fate, int] = {}
    for trace in traces:
        if trace.fate is not Fate.TRAINED and trace.num_tokens:
            wasted[trace.fate] = wasted.get(trace.fate, 0) + trace.num_tokens
    staleness = _staleness(inside, traces)
    return Activity(
        num_iterations=len(iterations),
        iteration_seconds=(window[1] - window[0]) / max(1, len(iterations)),
        stage_seconds=stage_seconds,
        trainer_busy=training.busy().mean(window),
        engines_busy=sum(engine.busy().mean(window) for engine in engines) / max(1, len(engines)),
        mean_running=sum(engine.mean(window) for engine in engines) / max(1, len(engines)),
        attempt_seconds=percentiles([trace.spans[-1].end - trace.spans[0].begin for trace in ended]),
        attempt_tokens=percentiles([float(trace.num_tokens) for trace in ended]),
        num_tokens=sum(trace.num_tokens for trace in traces),
        wasted_tokens=wasted,
        staleness=percentiles(staleness) if staleness else None,
    )


def _window(iterations: Sequence[Interval], traces: Sequence[AttemptTrace]) -> Interval:
    """Interval from the first begin to the last end of all iterations; without iterations, of all traces; else empty."""
    known = iterations or [(trace.drawn_at, trace.consumed_at) for trace in traces] or [(0.0, 0.0)]
    return min(begin for begin, _ in known), max(end for _, end in known)


def _staleness(spans: Sequence[StageSpan], traces: Sequence[AttemptTrace]) -> list[float]:
    """Staleness of each trained attempt, in weights versions: iteration n updates version n - 1.

    An attempt belongs to the iteration whose collect stage ended when the attempt was consumed.
    """
    collects = sorted((span.end, span.begin, span.iteration) for span in spans if span.stage == "collect")
    ends = [end for end, _, _ in collects]
    staleness = []
    for trace in traces:
        if trace.fate is not Fate.TRAINED or trace.oldest_version is None or not collects:
            continue
        end, begin, iteration = collects[min(bisect.bisect(ends, trace.consumed_at - MAX_CLOCK_SKEW_S), len(ends) - 1)]
        if iteration is not None and begin - MAX_CLOCK_SKEW_S <= trace.consumed_at <= end + MAX_CLOCK_SKEW_S:
            staleness.append(float(iteration - 1 - trace.oldest_version))
    return staleness


def rows_without_overlap(spans: Sequence[StageSpan]) -> list[list[StageSpan]]:
    """Distribute stages over as few rows as possible, so that no two in a row overlap."""
    rows: list[list[StageSpan]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    assert all(before.end <= after.begin for row in rows for before, after in pairwise(row))
    return rows
