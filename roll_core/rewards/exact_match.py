"""Reward for the exact answer, with optional partial credit for matching characters."""

from roll_core.rewards.base import Reward
from roll_core.types.trajectory import Problem, Score, Trajectory


class ExactMatchReward(Reward):
    """Reward of 1 for the exact answer; `partial_credit` (0 to 1) is the weight of the share of matching characters."""

    def __init__(self, partial_credit: float):
        self._partial_credit = partial_credit

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Score:
        given = trajectory.turns[-1].text.strip()
        correct = given == problem.answer
        weight = self._partial_credit
        return Score(value=(1 - weight) * correct + weight * matching_share(given, problem.answer), correct=correct)


def matching_share(given: str, expected: str) -> float:
    """Share of character positions that match; missing and superfluous characters count as mismatches.

    Example: matching_share("0143", "0134") == 0.5
    """
    longest = max(len(given), len(expected), 1)
    return sum(a == b for a, b in zip(given, expected, strict=False)) / longest
