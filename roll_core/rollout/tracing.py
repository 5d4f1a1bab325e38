"""From lives to the record of them."""

from collections.abc import Mapping
from dataclasses import replace

from roll_core.rollout.lifecycle import AttemptState, Page, Phase, Place
from roll_core.types.manifest import DrawOutcome
from roll_core.types.trace import AttemptTrace, Fate
from roll_core.types.trajectory import Trajectory

_FATE = {
    DrawOutcome.TRAINED: Fate.TRAINED,
    DrawOutcome.FILTERED: Fate.FILTERED,
    DrawOutcome.FAILED: Fate.FAILED,
    DrawOutcome.ABORTED: Fate.ABORTED,
}


def trace_of(
    page: Page,
    prompt_lengths: Mapping[int, int],
    trajectories: Mapping[Place, Trajectory],
    consumed_at: float,
    epoch: float,
) -> list[AttemptTrace]:
    """Of every attempt of a page. `epoch` makes the times of lives those of the world."""
    return [
        AttemptTrace(
            problem=group.number,
            attempt=life.place[1],
            fate=_fate(life, group.outcome),
            num_prompt_tokens=prompt_lengths[group.number],
            oldest_version=_oldest(trajectories.get(life.place)),
            drawn_at=epoch + group.drawn_at,
            spans=tuple(replace(span, begin=epoch + span.begin, end=epoch + span.end) for span in life.spans),
            grading_at=_when(life, Phase.GRADING, epoch),
            graded_at=_when(life, Phase.GRADED, epoch),
            consumed_at=epoch + consumed_at,
        )
        for group in page.groups
        for life in group.attempts
    ]


def _fate(life: AttemptState, outcome: DrawOutcome | None) -> Fate:
    assert outcome is not None, "a page has no open groups"
    match life.state:
        case Phase.ABORTED:
            return Fate.ABORTED
        case Phase.FAILED | Phase.ABANDONED:
            return Fate.FAILED
        case _:
            return _FATE[outcome]


def _when(life: AttemptState, state: Phase, epoch: float) -> float | None:
    """It came to a state, for the last time."""
    return next((epoch + at for seen, at in reversed(life.history) if seen is state), None)


def _oldest(trajectory: Trajectory | None) -> int | None:
    if trajectory is None:
        return None
    return min((version for turn in trajectory.turns for version in turn.weights_versions), default=None)
