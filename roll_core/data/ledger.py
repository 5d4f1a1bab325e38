"""The problem ledger: what became of every problem drawn from the stream. Each iteration's manifest holds its own page.

A draw is known by its place in the stream; the cursor of a run is the first place that no committed iteration has drawn. An
iteration that was not committed has drawn nothing, so after any crash each problem is trained as often as if there had been
none.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from roll_core.types.manifest import Collected, Draw, DrawOutcome, Draws, Manifest
from roll_core.types.trajectory import Ending, Trajectory


def draws_of(collected: Collected, trajectories: Sequence[Trajectory], trained_groups: set[int]) -> Draws:
    """What became of the problems a collect drew, given its trajectories and the groups that were trained on.

    A group is known by the offset of its draw. Those without trajectories have the outcome that the collect gave them.
    """
    attempts_of: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        attempts_of.setdefault(trajectory.group, []).append(trajectory)
    letters = [
        letter
        if letter != DrawOutcome.TRAINED.letter
        else _outcome(attempts_of.get(group, []), group in trained_groups).letter
        for group, letter in enumerate(collected.draws.outcomes)
    ]
    return Draws(first=collected.draws.first, outcomes="".join(letters))


def ledger(chain: Iterable[Manifest]) -> list[Draw]:
    """Every draw of a run, in the order of iterations."""
    return [draw for manifest in chain if manifest.draws is not None for draw in manifest.draws.each(manifest.iteration)]


def totals(chain: Iterable[Manifest]) -> str:
    """Example: 320 drawn: 300 trained, 18 filtered, 2 failed"""
    counts = Counter(draw.outcome for draw in ledger(chain))
    parts = [f"{counts[outcome]} {outcome}" for outcome in DrawOutcome if counts[outcome]]
    return f"{counts.total()} drawn: {', '.join(parts)}" if parts else ""


def _outcome(attempts: Sequence[Trajectory], is_trained: bool) -> DrawOutcome:
    if is_trained:
        return DrawOutcome.TRAINED
    if any(t.score is not None for t in attempts):
        return DrawOutcome.FILTERED
    return DrawOutcome.ABORTED if all(t.ending is Ending.ABORTED for t in attempts) else DrawOutcome.FAILED
