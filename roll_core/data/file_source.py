"""Problem source of files in any row format: rows become problems, and each epoch has its own seeded order."""

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll_core.config.problems import AnswerRule, Columns, FileProblems
from roll_core.data.prompts import prompt_messages
from roll_core.errors import UserError
from roll_core.seeds import derive_seed
from roll_core.types.trajectory import Demonstration, Message, Problem, Speaker

BOXED = re.compile(r"\\boxed\s*\{")
r"""Opening of a LaTeX box: \boxed{"""


@dataclass(frozen=True)
class SourceRow:
    """Row of a problem file.

    Example: SourceRow(file="train", number=3, location="line 3 of train.jsonl", values={"prompt": "6 x 7?", "answer": "42"})
    """

    file: str
    """Short name of the file, the prefix of its problem ids."""
    number: int
    location: str
    """Location for error messages."""
    values: Mapping[str, Any]


ReadRows = Callable[[str, Path, Columns], Iterable[SourceRow]]
"""Reader of a file format: (config key of the path, for error messages; path; columns) -> rows."""


class FileSource:
    """Problem source of a training file and a held-out file, both held in memory."""

    def __init__(self, config: FileProblems, read_rows: ReadRows, seed: int):
        train, held_out = (
            _problems(key, path, read_rows(key, Path(path), config.columns), config)
            for key, path in (("problems.train", config.train), ("problems.held_out", config.held_out))
        )
        self._train, self._held_out = train, held_out
        self._order = lru_cache(maxsize=2)(lambda epoch: _shuffled(len(train), derive_seed(seed, "epoch", epoch)))

    @property
    def domains(self) -> frozenset[str]:
        return frozenset(problem.domain for problem in self._train)

    def problem(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self._train))
        return self._train[self._order(epoch)[position]]

    def held_out(self, count: int) -> list[Problem]:
        if count > len(self._held_out):
            raise UserError(
                f"evaluation.num_problems ({count}) is more than the {len(self._held_out)} problems in problems.held_out"
            )
        return self._held_out[:count]

    def check_apart(self) -> None:
        """Raise UserError if a held-out problem is also trained on: its accuracy would say nothing."""
        trained = {problem.messages: problem.problem_id for problem in self._train}
        both = [problem for problem in self._held_out if problem.messages in trained]
        if both:
            raise UserError(
                f"problems.held_out: {len(both)} of its {len(self._held_out)} problems are also in problems.train, the "
                f"first is {both[0].problem_id}, which is {trained[both[0].messages]}: remove them from one of the files"
            )

    def demonstration(self, index: int) -> Demonstration:
        """Return a problem with its reference answer."""
        problem = self.problem(index)
        return Demonstration(problem, problem.answer)


def _problems(key: str, path: str, rows: Iterable[SourceRow], config: FileProblems) -> list[Problem]:
    """Convert every row to a problem; the error about a bad row names its location."""
    problems = []
    for row in rows:
        try:
            problems.append(_to_problem(row, config))
        except ValueError as error:
            raise UserError(f"{key}: {row.location} {error}") from None
    if not problems:
        raise UserError(f"{key}: {path} holds no problems")
    return problems


def _to_problem(row: SourceRow, config: FileProblems) -> Problem:
    columns = config.columns
    prompt, answer = (_value(row, column) for column in (columns.prompt, columns.answer))
    domain = (row.values.get("domain") or row.file) if columns.domain is None else _value(row, columns.domain)
    question = _messages(prompt) if isinstance(prompt, list) else str(prompt)
    extracted = extract_answer(config.answer_rule, str(answer))
    return Problem(f"{row.file}/{row.number}", str(domain), prompt_messages(config, question), extracted)


def _value(row: SourceRow, column: str) -> Any:
    """Value of a column; a dotted name reaches into nested values."""
    value: Any = row.values
    for part in (column,) if column in row.values else column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise ValueError(f"has no '{column}': give it one, or set problems.columns to what it has ({', '.join(row.values)})")
    return value


def _messages(prompt: list[Any]) -> list[Message]:
    """Convert chat messages of a row to `Message`s."""
    try:
        return [Message(Speaker(message["role"]), str(message["content"])) for message in prompt]
    except (KeyError, TypeError, ValueError):
        roles = ", ".join(Speaker)
        raise ValueError(
            f'has messages that are not like {{"role": "user", "content": "..."}} with a role of {roles}'
        ) from None


def extract_answer(rule: AnswerRule, text: str) -> str:
    """Extract the answer from a text that may also hold the solution: ('after_hashes', '6 x 7 = 42 #### 42') -> '42'."""
    match rule:
        case AnswerRule.WHOLE:
            return text
        case AnswerRule.AFTER_HASHES:
            _, hashes, answer = text.rpartition("####")
            return _require_answer(rule, answer.strip() if hashes else "", "####")
        case AnswerRule.BOXED:
            return _require_answer(rule, _last_boxed(text), "\\boxed{...}")


def _require_answer(rule: AnswerRule, answer: str, marker: str) -> str:
    if not answer:
        raise ValueError(f"has no {marker} in its answer, which problems.answer_rule {rule} asks for")
    return answer


def _last_boxed(text: str) -> str:
    r"""Content of the last \boxed{...}, nested braces included; '' without a closed box."""
    boxes = list(BOXED.finditer(text))
    if not boxes:
        return ""
    start, depth = boxes[-1].end(), 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return ""


def _shuffled(length: int, seed: int) -> list[int]:
    """Seeded permutation of the indices."""
    return random.Random(seed).sample(range(length), length)
