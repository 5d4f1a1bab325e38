"""Config of problem sources: generated puzzles, files, and Reasoning Gym."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt, field_validator

from roll_core.config.base import PathText, Section, Unit


class Puzzle(StrEnum):
    """Digit puzzles that a very small model can learn."""

    ADD = "add"
    """Add two numbers: 17+25= has the answer 042."""
    SORT = "sort"
    """Sort digits: 40213> has the answer 01234."""
    REVERSE = "reverse"
    """Reverse digits: 40213< has the answer 31204."""


class ArithmeticProblems(Section):
    """Digit puzzles generated from the seed, without end; held-out problems never appear in training."""

    kind: Literal["arithmetic"] = "arithmetic"
    puzzle: Puzzle = Puzzle.SORT
    """Puzzle to solve."""
    digits: Annotated[PositiveInt, Field(le=1000), Unit("digits")] = 5
    """Digits per number (add), or digits to sort or reverse. More digits are harder."""
    demonstration_noise: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of warm-start demonstrations whose answer is well formed but wrong; 1 teaches the format alone. Only with
    `warm_start`."""

    @property
    def num_puzzles(self) -> int:
        """Number of different puzzles, held-out ones included."""
        return 10 ** (self.digits * (2 if self.puzzle is Puzzle.ADD else 1))


PROMPT = "{prompt}"
"""Placeholder in a template for the problem's own text."""
OTHER_PLACEHOLDERS = ("{question}", "{problem}", "{query}", "{input}", "{instruction}")
"""Placeholders that other libraries have for the same; nothing replaces them here."""


class PromptTemplate(Section):
    """Text around every problem of a source."""

    system: str | None = None
    """System message before the problem; null leaves it to the model's chat template. Must be null if problems bring a
    system message of their own."""
    template: str = PROMPT
    """User message; {prompt} stands for the problem's own text."""

    @field_validator("template")
    @classmethod
    def _check_template_has_placeholder(cls, template: str) -> str:
        if PROMPT not in template:
            raise ValueError(f"'{template}' must contain {PROMPT}, where the problem's own text goes")
        if others := [name for name in OTHER_PLACEHOLDERS if name in template]:
            raise ValueError(f"only {PROMPT} is replaced, and {others[0]} would reach the model as it stands: remove it")
        return template


class Columns(Section):
    """Column names of a problem file. A dot reaches into a nested value: reward_model.ground_truth."""

    prompt: str = "prompt"
    """Column with the prompt: text, or a list of messages like {"role": "user", "content": "..."}."""
    answer: str = "answer"
    """Column with the expected answer."""
    domain: str | None = None
    """Column with the domain. Null takes the column 'domain' if rows have it, else the name of the file."""


class AnswerRule(StrEnum):
    """Rule that extracts the expected answer from the answer column."""

    WHOLE = "whole"
    """The whole text of the column."""
    AFTER_HASHES = "after_hashes"
    """Text after the last ####, as in GSM8K: '3 + 4 = 7 #### 7' -> '7'."""
    BOXED = "boxed"
    """Content of the last \\boxed{...}, as in MATH."""


class FileProblems(PromptTemplate):
    """Problems in two files: one to train on, in a seeded order that changes with each pass, and one to evaluate on."""

    train: PathText
    """Path of the training problems. A relative path starts at the working directory."""
    held_out: PathText
    """Path of the evaluation problems, used in file order. It must hold at least evaluation.num_problems."""
    columns: Columns = Columns()
    """Column names of both files."""
    answer_rule: AnswerRule = AnswerRule.WHOLE
    """Rule that extracts the expected answer from the answer column."""


class JsonlProblems(FileProblems):
    """JSON Lines files, one object a line: {"prompt": "...", "answer": "...", "domain": "..."} (domain optional)."""

    kind: Literal["jsonl"] = "jsonl"


class DatasetProblems(FileProblems):
    """Tables on disk. `train` and `held_out` each name a Parquet file, several by a pattern (`train-*.parquet`), a folder of
    Parquet files, or a split written by Hugging Face's `save_to_disk`."""

    kind: Literal["dataset"] = "dataset"


class GymTask(Section):
    """One generator of Reasoning Gym (github.com/open-thought/reasoning-gym)."""

    name: str
    """Name of the generator in Reasoning Gym: chain_sum, countdown, ...; also the domain of its problems."""
    weight: PositiveFloat = 1.0
    """Relative frequency of this task among all tasks."""
    params: Mapping[str, JsonValue] = {}
    """Settings of the generator, such as {min_terms: 2}; the others keep their defaults. `seed` and `size` are refused,
    because problems come from the run's seed."""

    @field_validator("params")
    @classmethod
    def _check_params_leave_seed_and_size(cls, params: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        if taken := sorted(params.keys() & {"seed", "size"}):
            raise ValueError(f"'{taken[0]}' is not for the config to say, problems come from the run's seed: remove it")
        return params


class ReasoningGymProblems(PromptTemplate):
    """Problems generated by Reasoning Gym from the seed, without end; held-out problems never appear in training."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: tuple[GymTask, ...] = Field(min_length=1)
    """Generators to draw problems from; at least one."""


ProblemsConfig = Annotated[
    ArithmeticProblems | JsonlProblems | DatasetProblems | ReasoningGymProblems, Field(discriminator="kind")
]
