"""Where problems come from, and how answers to them are graded."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from roll_core.config.base import Section


class Puzzle(StrEnum):
    ADD = "add"
    SORT = "sort"
    REVERSE = "reverse"


class ArithmeticProblems(Section):
    """Digit puzzles generated from the seed, without end; held-out problems never appear in training."""

    kind: Literal["arithmetic"] = "arithmetic"
    puzzle: Puzzle = Puzzle.SORT
    digits: PositiveInt = 5
    """Digits per number (add), or digits to sort or reverse."""
    demonstration_noise: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of warm-start demonstrations whose answer is well formed but wrong; 1 teaches the format alone."""


class JsonlProblems(Section):
    """One JSON object a line: {"prompt": "...", "answer": "...", "domain": "..."} (domain optional)."""

    kind: Literal["jsonl"] = "jsonl"
    train: str
    """File with training problems; drawn in a seeded order, reshuffled each pass."""
    held_out: str
    """File with evaluation problems, used in the order of the file."""


ProblemsConfig = Annotated[ArithmeticProblems | JsonlProblems, Field(discriminator="kind")]


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


RewardConfig = Annotated[ExactMatch | NumberMatch, Field(discriminator="kind")]
