"""Rewards: how completions are graded."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from roll_core.config.base import Section


class ExactMatch(Section):
    """Right when the answer, stripped of white space, equals the expected one to the letter."""

    kind: Literal["exact_match"] = "exact_match"
    partial_credit: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the reward given for the fraction of positions that are right; 0 pays only for right answers."""


class NumberMatch(Section):
    """Right when the last number in the answer equals the expected number."""

    kind: Literal["number_match"] = "number_match"
    tolerance: NonNegativeFloat = 0.0
    """Largest absolute difference that still counts as right."""


class SubprocessGrading(Section):
    """Grading that may hang, in processes of its own beside the reward worker."""

    deadline_seconds: PositiveFloat = 5.0
    """Longest time for one answer; then its process is replaced, and the trajectory counts as failed, not as wrong."""
    processes: PositiveInt = 2
    """Answers a reward worker grades at once."""


class MathVerify(SubprocessGrading):
    """Right when the mathematical expression in the answer equals the expected one, as Math-Verify sees it: 1/2 is 0.5."""

    kind: Literal["math_verify"] = "math_verify"


class ReasoningGym(SubprocessGrading):
    """What Reasoning Gym's own scorer of the task says, 0 to 1; right at 1. For problems of kind reasoning_gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tag: str | None = "answer"
    """Graded is what stands in the last <answer>...</answer>, or all of a completion without one; null always grades all."""


RewardConfig = Annotated[ExactMatch | NumberMatch | MathVerify | ReasoningGym, Field(discriminator="kind")]
