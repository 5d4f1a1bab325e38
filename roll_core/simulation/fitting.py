"""Fit of machine models to a recorded run: engines and graders to attempt traces, the trainer to manifest timings."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from roll_core.config.run import RunConfig
from roll_core.reporting.activity import StepFunction, count_over_time
from roll_core.simulation.machines import MIN_TOKEN_S, Cost, EngineModel, GraderModel, TrainerModel
from roll_core.simulation.simulator import MachineModels
from roll_core.types.trace import AttemptTrace, Fate, Span

ROUNDS = 6
"""Iterations of the engine fit; three are enough. Each weights spans by the token rates of the model before it."""
OUTLIER_FACTOR, MIN_KEPT_SHARE = 8.0, 0.75
"""Outlier rule of the engine fit: a span is left out if its residual exceeds OUTLIER_FACTOR times the median residual. At
least MIN_KEPT_SHARE of the spans is kept."""


def fit_models(
    config: RunConfig, traces: Sequence[Sequence[AttemptTrace]], timings: Sequence[Mapping[str, float]]
) -> MachineModels:
    """Fit speed models of the engines, graders and trainer to what a run recorded.

    Each of `traces` has the attempts of one iteration, and each of `timings` the seconds by stage from its manifest.
    """
    every = [trace for of_iteration in traces for trace in of_iteration]
    num_tokens = [sum(t.num_tokens for t in of_iteration if t.fate is Fate.TRAINED) for of_iteration in traces]
    return MachineModels(
        engine=fit_engine(every, config.rollout.slots_per_engine),
        grader=fit_grader(every),
        trainer=fit_trainer(timings, num_tokens, len(config.placement.trainer)),
    )


# -------------------------------------------------------------------------------------------------- engines
@dataclass(frozen=True)
class _Observed:
    """Spans of one engine, and its number of running sequences over time."""

    begins: NDArray[np.float64]
    """Times in seconds at which the spans got a slot."""
    ends: NDArray[np.float64]
    num_tokens: NDArray[np.float64]
    running: StepFunction
    """Number of sequences in slots, over time."""

    def others(self, model: EngineModel) -> NDArray[np.float64]:
        """Mean number of other sequences that ran, over the tokens of each span. The mean is weighted by token rate: an
        engine makes more tokens per second while fewer sequences run."""
        tokens_per_second = 1.0 / np.maximum(
            MIN_TOKEN_S, model.seconds_per_token + model.seconds_per_token_per_running * (self.running.levels - 1)
        )
        weights = np.where(self.running.levels > 0, tokens_per_second, 0.0)
        others = StepFunction(self.running.times, weights * np.maximum(0.0, self.running.levels - 1))
        return others.area(self.begins, self.ends) / StepFunction(self.running.times, weights).area(self.begins, self.ends)


def fit_engine(traces: Sequence[AttemptTrace], num_slots: int) -> EngineModel:
    """Fit an engine by non-negative least squares of a span's seconds on 1, tokens, and tokens x other running sequences.

    The spans with the largest residuals are left out: requests wait while an engine adopts weights.
    """
    spans_of: dict[str, list[Span]] = {}
    for trace in traces:
        for span in trace.spans:
            spans_of.setdefault(span.engine, []).append(span)
    observed = [seen for spans in spans_of.values() if (seen := _observe(spans, num_slots)) is not None]
    every = np.full(sum(len(seen.begins) for seen in observed), True)
    _, missed = _fit_spans(observed, every)
    return _fit_spans(observed, missed <= max(OUTLIER_FACTOR * np.median(missed), np.quantile(missed, MIN_KEPT_SHARE)))[0]


def _fit_spans(observed: Sequence[_Observed], chosen: NDArray[np.bool_]) -> tuple[EngineModel, NDArray[np.float64]]:
    """Fit the chosen spans; return the model and the absolute residual of every span in seconds."""
    seconds = np.concatenate([seen.ends - seen.begins for seen in observed])
    num_tokens = np.concatenate([seen.num_tokens for seen in observed])
    model, missed = EngineModel(0.0, 1.0), seconds
    for _ in range(ROUNDS):
        others = np.concatenate([seen.others(model) for seen in observed])
        columns = np.stack([np.ones_like(seconds), num_tokens, num_tokens * others], axis=1)
        weights = non_negative_least_squares(columns[chosen], seconds[chosen])
        model, missed = EngineModel(*weights.tolist()), np.abs(seconds - columns @ weights)
    return model, missed


def _observe(spans: Sequence[Span], num_slots: int) -> _Observed | None:
    """Observations of one engine; None if it never generated a token."""
    in_slots = with_slot_times(spans, num_slots)
    useful = [span for span in in_slots if span.num_tokens]
    if not useful:
        return None
    begins, ends, num_tokens = np.array([(span.begin, span.end, span.num_tokens) for span in useful]).T
    return _Observed(begins, ends, num_tokens, count_over_time((span.begin, span.end) for span in in_slots))


def with_slot_times(spans: Sequence[Span], num_slots: int) -> list[Span]:
    """Move the begin of each span to when it got a slot; drop spans that never got one.

    An engine holds more requests than it has slots and serves them first come, first served.
    """
    ends: list[float] = []
    in_slots = []
    for span in sorted(spans, key=lambda span: span.begin):
        begin = span.begin
        if len(ends) == num_slots:
            begin = max(begin, ends[0])
        if span.end <= begin:
            continue
        if len(ends) == num_slots:
            heapq.heapreplace(ends, span.end)
        else:
            heapq.heappush(ends, span.end)
        in_slots.append(replace(span, begin=begin))
    return in_slots


def non_negative_least_squares(columns: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares with weights >= 0. Exact: solves every subset of the few columns."""
    num_columns = columns.shape[1]
    best, least = np.zeros(num_columns), float(wanted @ wanted)
    for size in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), size):
            weights, *_ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)
            missed = wanted - columns[:, chosen] @ weights
            if (weights >= 0).all() and missed @ missed < least:
                best = np.zeros(num_columns)
                best[list(chosen)] = weights
                least = float(missed @ missed)
    return best


# -------------------------------------------------------------------------------------------------- graders and trainer
def fit_grader(traces: Sequence[AttemptTrace]) -> GraderModel:
    """Fit grading seconds per attempt. Attempts sent and returned at the same times were one call and share its duration."""
    calls: dict[tuple[float, float], int] = {}
    for trace in traces:
        if trace.grading_at is not None and trace.graded_at is not None:
            call = (trace.grading_at, trace.graded_at)
            calls[call] = calls.get(call, 0) + 1
    seconds = [(end - begin) / count for (begin, end), count in calls.items() for _ in range(count)]
    return GraderModel(tuple(seconds) or (0.0,))


def fit_trainer(timings: Sequence[Mapping[str, float]], num_tokens: Sequence[int], num_devices: int) -> TrainerModel:
    """Fit the trainer: a line over batch tokens for `prepare` and `update`, means for the other stages."""

    def cost(*stages: str) -> Cost:
        seconds = np.array([sum(timing.get(stage, 0.0) for stage in stages) for timing in timings])
        columns = np.stack([np.ones(len(num_tokens)), np.array(num_tokens, dtype=float)], axis=1)
        return Cost(*non_negative_least_squares(columns, seconds).tolist())

    def mean(stage: str) -> float:
        """Mean seconds over the iterations that had the stage."""
        seconds = [timing[stage] for timing in timings if stage in timing]
        return sum(seconds) / max(1, len(seconds))

    between = [timing["wall"] - sum(seconds for stage, seconds in timing.items() if stage != "wall") for timing in timings]
    return TrainerModel(
        num_devices=num_devices,
        prepare=cost("prepare"),
        update=cost("update_critic", "update"),
        publish_seconds=mean("publish"),
        evaluate_seconds=mean("evaluate"),
        checkpoint_seconds=mean("checkpoint"),
        other_seconds=sum(max(0.0, seconds) for seconds in between) / max(1, len(between)),
    )
