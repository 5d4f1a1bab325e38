"""The problem ledger: what became of every problem drawn from the stream. Each iteration's manifest holds its own page.

A draw is known by its place in the stream; the cursor of a run is the first place that no committed iteration has drawn. An
iteration that was not committed has drawn nothing, so after any crash each problem is trained as often as if there had been
none.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from roll_core.types.manifest import CollectRequest, Draw, DrawOutcome, Draws, Manifest
from roll_core.types.trajectory import Ending, Trajectory


def draws_of(request: CollectRequest, trajectories: Sequence[Trajectory], trained_groups: set[int]) -> Draws:
    """What became of the problems a request drew, given the groups that were trained on."""
    letters = [_outcome(group, trajectories, trained_groups).letter for group in range(request.num_groups)]
    return Draws(first=request.first_problem, outcomes="".join(letters))


def ledger(chain: Iterable[Manifest]) -> list[Draw]:
    """Every draw of a run, in the order of iterations."""
    return [draw for manifest in chain if manifest.draws is not None for draw in manifest.draws.each(manifest.iteration)]


def totals(chain: Iterable[Manifest]) -> str:
    """Example: 320 drawn: 300 trained, 18 filtered, 2 failed"""
    counts = Counter(draw.outcome for draw in ledger(chain))
    parts = [f"{counts[outcome]} {outcome}" for outcome in DrawOutcome if counts[outcome]]
    return f"{counts.total()} drawn: {', '.join(parts)}" if parts else ""


def _outcome(group: int, trajectories: Sequence[Trajectory], trained_groups: set[int]) -> DrawOutcome:
    if group in trained_groups:
        return DrawOutcome.TRAINED
    attempts = [t for t in trajectories if t.group == group]
    if any(t.score is not None for t in attempts):
        return DrawOutcome.FILTERED
    return DrawOutcome.ABORTED if all(t.ending is Ending.ABORTED for t in attempts) else DrawOutcome.FAILED
