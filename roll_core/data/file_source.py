"""Problems that lie in files, whatever the format: rows become problems, each pass over them has its own seeded order."""

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll_core.config.problems import AnswerRule, Columns, FileProblems
from roll_core.data.prompts import worded
from roll_core.errors import UserError
from roll_core.seeds import derive_seed
from roll_core.types.trajectory import Demonstration, Message, Problem, Speaker

BOXED = re.compile(r"\\boxed\s*\{")


@dataclass(frozen=True)
class SourceRow:
    """One problem as a file has it.

    Example: SourceRow(file="train", number=3, place="line 3 of /data/train.jsonl", values={"prompt": "6 x 7?", "answer": "42"})
    """

    file: str
    number: int
    place: str
    values: Mapping[str, Any]


ReadRows = Callable[[str, Path, Columns], Iterable[SourceRow]]
"""The rows behind a path, which the config has under the key that is given, too: for sentences about what is wrong."""


class FileSource:
    """Problems to train on and problems to evaluate, all in memory."""

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

    def demonstration(self, index: int) -> Demonstration:
        """The reference answer itself."""
        problem = self.problem(index)
        return Demonstration(problem, problem.answer)


def _problems(key: str, path: str, rows: Iterable[SourceRow], config: FileProblems) -> list[Problem]:
    """Every row as a problem; a bad one is named by its place."""
    problems = []
    for row in rows:
        try:
            problems.append(_problem_of(row, config))
        except ValueError as error:
            raise UserError(f"{key}: {row.place} {error}") from None
    if not problems:
        raise UserError(f"{key}: {path} holds no problems")
    return problems


def _problem_of(row: SourceRow, config: FileProblems) -> Problem:
    columns = config.columns
    prompt, answer = (_value(row, column) for column in (columns.prompt, columns.answer))
    domain = (row.values.get("domain") or row.file) if columns.domain is None else _value(row, columns.domain)
    question = _messages(prompt) if isinstance(prompt, list) else str(prompt)
    extracted = extract_answer(config.answer_rule, str(answer))
    return Problem(f"{row.file}/{row.number}", str(domain), worded(config, question), extracted)


def _value(row: SourceRow, column: str) -> Any:
    """What a row has under a column, or under the dotted parts of its name."""
    value: Any = row.values
    for part in (column,) if column in row.values else column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise ValueError(f"has no '{column}': give it one, or set problems.columns to what it has ({', '.join(row.values)})")
    return value


def _messages(prompt: list[Any]) -> list[Message]:
    try:
        return [Message(Speaker(message["role"]), str(message["content"])) for message in prompt]
    except (KeyError, TypeError, ValueError):
        roles = ", ".join(Speaker)
        raise ValueError(
            f'has messages that are not like {{"role": "user", "content": "..."}} with a role of {roles}'
        ) from None


def extract_answer(rule: AnswerRule, text: str) -> str:
    """The answer in a text that may also hold the way to it: ('after_hashes', '6 x 7 = 42 #### 42') -> '42'."""
    match rule:
        case AnswerRule.WHOLE:
            return text
        case AnswerRule.AFTER_HASHES:
            _, hashes, answer = text.rpartition("####")
            return _found(rule, answer.strip() if hashes else "", "####")
        case AnswerRule.BOXED:
            return _found(rule, _last_boxed(text), "\\boxed{...}")


def _found(rule: AnswerRule, answer: str, marker: str) -> str:
    if not answer:
        raise ValueError(f"has no {marker} in its answer, which problems.answer_rule {rule} asks for")
    return answer


def _last_boxed(text: str) -> str:
    """What the last box holds, braces within it included; '' without a box that is closed."""
    boxes = list(BOXED.finditer(text))
    if not boxes:
        return ""
    start, depth = boxes[-1].end(), 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip()
    return ""


def _shuffled(length: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(length), length)
