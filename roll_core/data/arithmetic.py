"""Digit puzzles: generated, verifiable, learnable by a very small model. Sort '40213>' -> '01234'; add '17+25=' -> '042'."""

import random
from itertools import count as count_from

from roll_core.config.problems import ArithmeticProblems, Puzzle
from roll_core.data.held_out import is_held_out
from roll_core.errors import UserError
from roll_core.seeds import derive_seed
from roll_core.types.trajectory import Demonstration, Message, Problem, Speaker


class ArithmeticSource:
    """Problem source of generated digit puzzles."""

    def __init__(self, config: ArithmeticProblems, seed: int):
        self._config = config
        self._seed = seed

    @property
    def domains(self) -> frozenset[str]:
        return frozenset({self._config.puzzle.value})

    def problem(self, index: int) -> Problem:
        rng = random.Random(derive_seed(self._seed, "problem", index))
        while True:
            question, answer = self._draw(rng)
            if not is_held_out(question):
                return self._as_problem(f"train/{index}", question, answer)

    def held_out(self, count: int) -> list[Problem]:
        """Return the first `count` held-out puzzles. They do not depend on the run's seed, so that runs can be compared."""
        rng = random.Random(derive_seed(0, "held-out"))
        found: dict[str, str] = {}
        for draw in count_from():
            question, answer = self._draw(rng)
            if is_held_out(question):
                found[question] = answer
            if len(found) == count:
                break
            if draw > 200 * count:
                raise UserError(
                    f"evaluation.num_problems ({count}) is more than problems.digits={self._config.digits} can give: "
                    "lower it or raise problems.digits"
                )
        return [self._as_problem(f"held-out/{i}", question, answer) for i, (question, answer) in enumerate(found.items())]

    def demonstration(self, index: int) -> Demonstration:
        """Return a puzzle with its answer, or with a wrong one at the rate of `problems.demonstration_noise`."""
        problem = self.problem(-1 - index)
        rng = random.Random(derive_seed(self._seed, "demonstration", index))
        wrong = rng.random() < self._config.demonstration_noise
        return Demonstration(problem, self._shuffled(rng, problem.answer) if wrong else problem.answer)

    def _draw(self, rng: random.Random) -> tuple[str, str]:
        """Random question and its answer."""
        digits = self._config.digits
        text = "".join(rng.choice("0123456789") for _ in range(digits))
        match self._config.puzzle:
            case Puzzle.SORT:
                return f"{text}>", "".join(sorted(text))
            case Puzzle.REVERSE:
                return f"{text}<", text[::-1]
            case Puzzle.ADD:
                other = "".join(rng.choice("0123456789") for _ in range(digits))
                return f"{text}+{other}=", str(int(text) + int(other)).zfill(digits + 1)

    def _shuffled(self, rng: random.Random, answer: str) -> str:
        """Wrong answer in the right form: the answer's characters in random order, or a random number for a sum."""
        if self._config.puzzle is Puzzle.ADD:
            return str(rng.randrange(2 * 10**self._config.digits - 1)).zfill(len(answer))
        return "".join(rng.sample(answer, len(answer)))

    def _as_problem(self, name: str, question: str, answer: str) -> Problem:
        domain = self._config.puzzle.value
        return Problem(f"{domain}/{name}", domain, (Message(Speaker.USER, question),), answer)
