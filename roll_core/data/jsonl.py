"""Problems from JSON lines: the way to bring your own data. Each pass over the file has its own seeded order."""

import json
import random
from functools import lru_cache
from pathlib import Path

from roll_core.config.problems import JsonlProblems
from roll_core.errors import UserError
from roll_core.seeds import derive_seed
from roll_core.types.trajectory import Demonstration, Message, Problem, Speaker


class JsonlSource:
    def __init__(self, config: JsonlProblems, seed: int):
        self._train = read_problems("problems.train", Path(config.train))
        self._held_out = read_problems("problems.held_out", Path(config.held_out))
        self._order = lru_cache(maxsize=2)(lambda epoch: _shuffled(len(self._train), derive_seed(seed, "epoch", epoch)))

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


def read_problems(key: str, path: Path) -> list[Problem]:
    """Read and check a whole file; a bad line is named by its number."""
    if not path.is_file():
        raise UserError(f"{key}: no such file {path}")
    problems = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            domain = str(row.get("domain", path.stem))
            problem = Problem(
                f"{path.stem}/{number}", domain, (Message(Speaker.USER, str(row["prompt"])),), str(row["answer"])
            )
        except (json.JSONDecodeError, AttributeError, KeyError):
            raise UserError(f'{key}: line {number} of {path} must be like {{"prompt": "...", "answer": "..."}}') from None
        problems.append(problem)
    if not problems:
        raise UserError(f"{key}: {path} holds no problems")
    return problems


def _shuffled(length: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(length), length)
