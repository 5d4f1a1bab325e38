"""Problems that Reasoning Gym generates: endless, verifiable, a hundred tasks. An item is a function of task, settings and
seed, so a problem carries those three and its grader makes the item again, metadata and all."""

import difflib
import json
import random
from collections.abc import Mapping
from functools import lru_cache
from itertools import count as count_from
from typing import Any

from pydantic import JsonValue

from roll_core.config.problems import GymTask, ReasoningGymProblems
from roll_core.data.held_out import is_held_out
from roll_core.data.prompts import worded
from roll_core.errors import UserError, one_line
from roll_core.extras import Extra, require
from roll_core.seeds import derive_seed
from roll_core.types.trajectory import Demonstration, Problem

SEEDS = 2**32
"""Some tasks give their seed to numpy, which takes no larger one."""
MOST_DRAWS = 200
"""Items drawn for one problem before a task is taken to have too few different ones."""


class ReasoningGymSource:
    def __init__(self, config: ReasoningGymProblems, seed: int):
        require("reasoning_gym", Extra.MATH, "problems.kind reasoning_gym")
        for number, task in enumerate(config.tasks):
            _check_task(f"problems.tasks.{number}", task)
        self._config = config
        self._seed = seed
        self._held_out: list[Problem] = []

    @property
    def domains(self) -> frozenset[str]:
        return frozenset(task.name for task in self._config.tasks)

    def problem(self, index: int) -> Problem:
        rng = random.Random(derive_seed(self._seed, "problem", index))
        task, item_seed, item = self._draw(rng)
        for _ in range(MOST_DRAWS - 1):
            if not is_held_out(item["question"]):
                return self._as_problem(f"train/{index}", task, item_seed, item)
            task, item_seed, item = self._draw(rng)
        raise UserError(f"problems.tasks: {task.name} generates too few different problems: widen its params")

    def held_out(self, count: int) -> list[Problem]:
        """The evaluation set does not depend on the run's seed, so that runs can be compared."""
        if len(self._held_out) < count:
            self._held_out = self._draw_held_out(count)
        return self._held_out[:count]

    def demonstration(self, index: int) -> Demonstration:
        """The reference answer itself."""
        problem = self.problem(-1 - index)
        if not problem.answer:
            raise UserError(f"warm_start: Reasoning Gym has no answers to {problem.domain}, only a scorer: make it null")
        return Demonstration(problem, problem.answer)

    def _draw_held_out(self, count: int) -> list[Problem]:
        rng = random.Random(derive_seed(0, "held-out"))
        found: dict[str, Problem] = {}
        for draw in count_from():
            if len(found) == count:
                return list(found.values())
            if draw > MOST_DRAWS * count:
                break
            task, item_seed, item = self._draw(rng)
            question = item["question"]
            if is_held_out(question) and question not in found:
                found[question] = self._as_problem(f"held-out/{len(found)}", task, item_seed, item)
        raise UserError(
            f"evaluation.num_problems ({count}) is more than the different problems in problems.tasks: "
            "lower it, or widen their params"
        )

    def _draw(self, rng: random.Random) -> tuple[GymTask, int, dict[str, Any]]:
        tasks = self._config.tasks
        task = rng.choices(tasks, [task.weight for task in tasks])[0]
        item_seed = rng.randrange(SEEDS)
        return task, item_seed, generate(task.name, task.params, item_seed)

    def _as_problem(self, place: str, task: GymTask, item_seed: int, item: Mapping[str, Any]) -> Problem:
        recipe = json.dumps({"task": task.name, "params": task.params, "seed": item_seed})
        messages = worded(self._config, item["question"])
        return Problem(f"{task.name}/{place}", task.name, messages, item["answer"] or "", recipe)


def generate(task: str, params: Mapping[str, JsonValue], seed: int) -> dict[str, Any]:
    """One item: question, answer (None where only a scorer knows) and metadata."""
    try:
        return generator(task, json.dumps(params))[seed]
    except IndexError:  # a few tasks lay out all their items beforehand
        from reasoning_gym import create_dataset

        return create_dataset(task, seed=seed, size=1, **params)[0]


@lru_cache(maxsize=128)
def generator(task: str, params: str) -> Any:
    """Reasoning Gym's dataset of a task, settings as JSON. Making one may read lists of words: a tenth of a second."""
    from reasoning_gym import create_dataset

    return create_dataset(task, seed=0, **json.loads(params))


def _check_task(key: str, task: GymTask) -> None:
    from reasoning_gym.factory import DATASETS

    if task.name not in DATASETS:
        near = difflib.get_close_matches(task.name, DATASETS, n=1)
        guess = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise UserError(f"{key}.name: Reasoning Gym has no task '{task.name}'; {guess}")
    try:
        generate(task.name, task.params, 0)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{key}.params: {task.name} does not take them ({one_line(error)})") from None
