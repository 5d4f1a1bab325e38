"""Problem ledger: the outcome of every problem drawn from the stream. Each manifest holds the draws of its iteration.

A draw is identified by its position in the stream. The cursor of a run is the first position that no committed iteration has
drawn. An uncommitted iteration has drawn nothing, so after any crash each problem is trained as often as without it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from roll_core.types.manifest import Collected, Draw, DrawOutcome, Draws, Manifest
from roll_core.types.trajectory import Ending, Trajectory


def resolve_draws(collected: Collected, trajectories: Sequence[Trajectory], trained_groups: set[int]) -> Draws:
    """Determine the outcome of every problem that a collect drew, given its trajectories and the groups that were trained
    on.

    A group is identified by the offset of its draw. A draw that the collect did not mark as trained keeps its outcome.
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
    """List every draw of a run, in the order of iterations."""
    return [draw for manifest in chain if manifest.draws is not None for draw in manifest.draws.expand(manifest.iteration)]


def totals(chain: Iterable[Manifest]) -> str:
    """Count the draws of a run by outcome, as a sentence.

    Example: 320 drawn: 300 trained, 18 filtered, 2 failed
    """
    counts = Counter(draw.outcome for draw in ledger(chain))
    parts = [f"{counts[outcome]} {outcome}" for outcome in DrawOutcome if counts[outcome]]
    return f"{counts.total()} drawn: {', '.join(parts)}" if parts else ""


def _outcome(attempts: Sequence[Trajectory], is_trained: bool) -> DrawOutcome:
    """Outcome of an accepted group: trained, or why it was not."""
    if is_trained:
        return DrawOutcome.TRAINED
    if any(t.score is not None for t in attempts):
        return DrawOutcome.FILTERED
    return DrawOutcome.ABORTED if all(t.ending is Ending.ABORTED for t in attempts) else DrawOutcome.FAILED
