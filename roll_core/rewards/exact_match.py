"""The answer to the letter, with optional credit for the positions that are right."""

from roll_core.types.trajectory import Problem, Score, Trajectory


class ExactMatchReward:
    def __init__(self, partial_credit: float):
        self._partial_credit = partial_credit

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Score:
        given = trajectory.turns[-1].text.strip()
        correct = given == problem.answer
        share = self._partial_credit
        return Score(value=(1 - share) * correct + share * matching_share(given, problem.answer), correct=correct)


def matching_share(given: str, expected: str) -> float:
    """Fraction of positions that agree; missing and superfluous ones disagree. matching_share("0143", "0134") == 0.5"""
    longest = max(len(given), len(expected), 1)
    return sum(a == b for a, b in zip(given, expected, strict=False)) / longest
