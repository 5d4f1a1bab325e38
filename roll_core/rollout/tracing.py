"""Conversion of attempt states to the stored trace of a batch (`types.trace`). Used by `stream.py`."""

from collections.abc import Mapping
from dataclasses import replace

from roll_core.rollout.lifecycle import AttemptId, AttemptState, LedgerPage, Phase
from roll_core.types.manifest import DrawOutcome
from roll_core.types.trace import AttemptTrace, Fate
from roll_core.types.trajectory import Trajectory

_FATE = {
    DrawOutcome.TRAINED: Fate.TRAINED,
    DrawOutcome.FILTERED: Fate.FILTERED,
    DrawOutcome.FAILED: Fate.FAILED,
    DrawOutcome.ABORTED: Fate.ABORTED,
}


def build_trace(
    page: LedgerPage,
    prompt_lengths: Mapping[int, int],
    trajectories: Mapping[AttemptId, Trajectory],
    consumed_at: float,
    epoch: float,
) -> list[AttemptTrace]:
    """Build the trace of every attempt of a page.

    `prompt_lengths` has the prompt tokens by group. `epoch` is added to event-loop times to get seconds since 1970.
    """
    return [
        AttemptTrace(
            problem=group.number,
            attempt=attempt.attempt_id[1],
            fate=_fate(attempt, group.outcome),
            num_prompt_tokens=prompt_lengths[group.number],
            oldest_version=_oldest(trajectories.get(attempt.attempt_id)),
            drawn_at=epoch + group.drawn_at,
            spans=tuple(replace(span, begin=epoch + span.begin, end=epoch + span.end) for span in attempt.spans),
            grading_at=_when(attempt, Phase.GRADING, epoch),
            graded_at=_when(attempt, Phase.GRADED, epoch),
            consumed_at=epoch + consumed_at,
        )
        for group in page.groups
        for attempt in group.attempts
    ]


def _fate(attempt: AttemptState, outcome: DrawOutcome | None) -> Fate:
    assert outcome is not None, "a page has no open groups"
    match attempt.phase:
        case Phase.ABORTED:
            return Fate.ABORTED
        case Phase.FAILED | Phase.ABANDONED:
            return Fate.FAILED
        case _:
            return _FATE[outcome]


def _when(attempt: AttemptState, phase: Phase, epoch: float) -> float | None:
    """Time at which the attempt last entered a phase; None if it never did."""
    return next((epoch + at for seen, at in reversed(attempt.history) if seen is phase), None)


def _oldest(trajectory: Trajectory | None) -> int | None:
    """Oldest weights version among the tokens of a trajectory."""
    if trajectory is None:
        return None
    return min((version for turn in trajectory.turns for version in turn.weights_versions), default=None)
