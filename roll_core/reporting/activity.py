"""Who was busy when: stages and traces of attempts, as levels over time and as the few numbers that sum them up.

Pure; `timeline.py` draws what this counts, and whoever predicts a run's speed compares with the same numbers.
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
"""From when until when, in seconds since the epoch."""
CLOCKS_APART_S = 0.1
"""How far the clocks of the driver and the rollout scheduler may be apart; no iteration is as short."""
TRAINING = ("prepare", "update_critic", "update")
"""Stages in which the trainer computes; in the others it waits."""


@dataclass(frozen=True)
class Levels:
    """A number that changes at times: `levels[i]` holds from `times[i]` on. Before the first time it is 0.

    Example: Levels(times=[0.0, 1.0, 3.0], levels=[2.0, 1.0, 0.0]) is two things for a second, then one for two.
    """

    times: NDArray[np.float64]
    levels: NDArray[np.float64]

    @property
    def peak(self) -> int:
        return int(self.levels.max())

    def mean(self, window: Interval) -> float:
        begin, end = window
        return float(self.area(np.array([begin]), np.array([end]))[0]) / (end - begin) if end > begin else 0.0

    def area(self, begins: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
        """Level times seconds, from each beginning to its end."""
        until = np.concatenate([[0.0], np.cumsum(self.levels[:-1] * np.diff(self.times))])
        return np.interp(ends, self.times, until) - np.interp(begins, self.times, until)

    def coarse(self, window: Interval, num_columns: int) -> "Levels":
        """Means over columns of equal width: the same area in fewer numbers."""
        edges = np.linspace(*window, num_columns + 1)
        return Levels(edges, np.append(self.area(edges[:-1], edges[1:]) / np.diff(edges), 0.0))

    def busy(self) -> "Levels":
        """1 where this is above 0."""
        return Levels(self.times, (self.levels > 0).astype(float))


def count_over_time(intervals: Iterable[Interval]) -> Levels:
    """How many of these are open at any time."""
    begins_and_ends = np.array([(begin, end) for begin, end in intervals if end > begin]).reshape(-1, 2)
    if not len(begins_and_ends):
        return Levels(np.zeros(1), np.zeros(1))
    times, places = np.unique(begins_and_ends, return_inverse=True)
    begun, ended = (np.bincount(column, minlength=len(times)) for column in places.reshape(-1, 2).T)
    return Levels(times, np.cumsum(begun - ended).astype(float))


# -------------------------------------------------------------------------------------------------- what was open when
@dataclass(frozen=True)
class StageSpan:
    """Example: StageSpan(stage="update", name="update 3", iteration=3, begin=1763200005.1, end=1763200006.4)"""

    stage: str
    name: str
    iteration: int | None
    begin: float
    end: float


def stage_spans(events: Sequence[StageEvent]) -> list[StageSpan]:
    """Stages from their beginning to their end, in order. One that was cut short has no end, and is left out."""
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
    """From the first stage of an iteration to the end of its last, by number."""
    intervals: dict[int, Interval] = {}
    for span in spans:
        if span.iteration is not None:
            begin, end = intervals.get(span.iteration, (span.begin, span.end))
            intervals[span.iteration] = (min(begin, span.begin), max(end, span.end))
    return dict(sorted(intervals.items()))


def waiting_for_engines(trace: AttemptTrace) -> list[Interval]:
    """Drawn and not yet with an engine, or between two of them."""
    ends = [trace.drawn_at, *(span.end for span in trace.spans)]
    begins = [*(span.begin for span in trace.spans)]
    if not begins:
        return [(trace.drawn_at, trace.consumed_at)]
    return list(zip(ends[:-1], begins, strict=True))


def being_graded(traces: Iterable[AttemptTrace]) -> list[Interval]:
    return [
        (trace.grading_at, trace.graded_at if trace.graded_at is not None else trace.consumed_at)
        for trace in traces
        if trace.grading_at is not None
    ]


def ready_groups(traces: Iterable[AttemptTrace]) -> list[Interval]:
    """A group from its last grade until its iteration took it."""
    complete: dict[int, Interval] = {}
    for trace in traces:
        if trace.fate is Fate.TRAINED and trace.graded_at is not None:
            graded_at, _ = complete.get(trace.problem, (trace.graded_at, 0.0))
            complete[trace.problem] = (max(graded_at, trace.graded_at), trace.consumed_at)
    return list(complete.values())


def engine_intervals(traces: Iterable[AttemptTrace]) -> dict[str, list[Interval]]:
    """Attempts with each engine, in the order of engines' names (engine 2 before engine 10)."""
    intervals: dict[str, list[Interval]] = {}
    for trace in traces:
        for span in trace.spans:
            intervals.setdefault(span.engine, []).append((span.begin, span.end))
    return dict(sorted(intervals.items(), key=lambda named: (len(named[0]), named[0])))


# -------------------------------------------------------------------------------------------------- summed up
@dataclass(frozen=True)
class Percentiles:
    """Example: Percentiles(p50=1.2, p90=4.0, p99=9.7)"""

    p50: float
    p90: float
    p99: float


def percentiles(values: Sequence[float]) -> Percentiles:
    return Percentiles(*(float(p) for p in np.percentile(values, [50, 90, 99]))) if len(values) else Percentiles(0, 0, 0)


@dataclass(frozen=True)
class Activity:
    """What some iterations came to. Shares are of their time, from the first's beginning to the last's end."""

    num_iterations: int
    iteration_seconds: float
    """Mean, from one commit to the next."""
    stage_seconds: dict[str, float]
    """Mean per iteration, by stage."""
    trainer_busy: float
    """Share of time in stages where the trainer computes."""
    engines_busy: float
    """Share of time with at least one attempt running, mean of the engines."""
    mean_running: float
    """Attempts at once, per engine."""
    attempt_seconds: Percentiles
    """With engines, from an attempt's first token to its last; of those that were not aborted."""
    attempt_tokens: Percentiles
    num_tokens: int
    wasted_tokens: dict[Fate, int]
    """By what became of the attempts that had them."""
    staleness: Percentiles | None
    """Weights versions between an attempt's oldest token and its update; None where iterations are not known."""

    @property
    def bubble(self) -> float:
        """Share of time in which the trainer computes nothing."""
        return 1.0 - self.trainer_busy


def summarise(spans: Sequence[StageSpan], traces: Sequence[AttemptTrace]) -> Activity:
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
    known = iterations or [(trace.drawn_at, trace.consumed_at) for trace in traces] or [(0.0, 0.0)]
    return min(begin for begin, _ in known), max(end for _, end in known)


def _staleness(spans: Sequence[StageSpan], traces: Sequence[AttemptTrace]) -> list[float]:
    """Iteration n learns from version n - 1; an attempt is of the iteration whose collect ended when it was consumed."""
    collects = sorted((span.end, span.begin, span.iteration) for span in spans if span.stage == "collect")
    ends = [end for end, _, _ in collects]
    staleness = []
    for trace in traces:
        if trace.fate is not Fate.TRAINED or trace.oldest_version is None or not collects:
            continue
        end, begin, iteration = collects[min(bisect.bisect(ends, trace.consumed_at - CLOCKS_APART_S), len(ends) - 1)]
        if iteration is not None and begin - CLOCKS_APART_S <= trace.consumed_at <= end + CLOCKS_APART_S:
            staleness.append(float(iteration - 1 - trace.oldest_version))
    return staleness


def side_by_side(spans: Sequence[StageSpan]) -> list[list[StageSpan]]:
    """Rows in which no two stages overlap, as few as it takes."""
    rows: list[list[StageSpan]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    assert all(before.end <= after.begin for row in rows for before, after in pairwise(row))
    return rows
