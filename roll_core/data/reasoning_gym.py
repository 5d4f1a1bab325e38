"""Problem source of Reasoning Gym: a hundred generated, verifiable tasks. An item is a function of task, params and seed, so
a problem carries these three as its recipe. The grader regenerates the item, with its metadata, from the recipe."""

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
from roll_core.data.prompts import prompt_messages
from roll_core.errors import UserError, one_line
from roll_core.extras import Extra, require
from roll_core.seeds import derive_seed
from roll_core.types.trajectory import Demonstration, Problem

NUM_SEEDS = 2**32
"""Number of item seeds. Some tasks pass the seed to numpy, which takes none above 2**32 - 1."""
MAX_DRAWS = 200
"""Maximum items drawn per problem; beyond it a task is taken to have too few different items."""


class ReasoningGymSource:
    """Problem source of Reasoning Gym tasks, mixed by weight."""

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
        for _ in range(MAX_DRAWS - 1):
            if not is_held_out(item["question"]):
                return self._as_problem(f"train/{index}", task, item_seed, item)
            task, item_seed, item = self._draw(rng)
        raise UserError(f"problems.tasks: {task.name} generates too few different problems: widen its params")

    def held_out(self, count: int) -> list[Problem]:
        """Return the first `count` held-out problems. They do not depend on the run's seed, so that runs can be compared."""
        if len(self._held_out) < count:
            self._held_out = self._draw_held_out(count)
        return self._held_out[:count]

    def demonstration(self, index: int) -> Demonstration:
        """Return a problem with its reference answer; UserError for a task that has only a scorer."""
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
            if draw > MAX_DRAWS * count:
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
        """Random task, item seed and item."""
        tasks = self._config.tasks
        task = rng.choices(tasks, [task.weight for task in tasks])[0]
        item_seed = rng.randrange(NUM_SEEDS)
        return task, item_seed, generate_item(task.name, task.params, item_seed)

    def _as_problem(self, name: str, task: GymTask, item_seed: int, item: Mapping[str, Any]) -> Problem:
        recipe = json.dumps({"task": task.name, "params": task.params, "seed": item_seed})
        messages = prompt_messages(self._config, item["question"])
        return Problem(f"{task.name}/{name}", task.name, messages, item["answer"] or "", recipe)


def generate_item(task: str, params: Mapping[str, JsonValue], seed: int) -> dict[str, Any]:
    """Generate one item: question, answer (None if only a scorer can tell) and metadata."""
    try:
        return load_task(task, json.dumps(params))[seed]
    except IndexError:  # a few tasks generate a fixed number of items in advance
        from reasoning_gym import create_dataset

        return create_dataset(task, seed=seed, size=1, **params)[0]


@lru_cache(maxsize=128)
def load_task(task: str, params: str) -> Any:
    """Load Reasoning Gym's dataset of a task; `params` is JSON. Cached, because loading may read word lists (0.1 s)."""
    from reasoning_gym import create_dataset

    return create_dataset(task, seed=0, **json.loads(params))


def _check_task(key: str, task: GymTask) -> None:
    """Raise UserError if the task does not exist or does not take its params; `key` is its config key."""
    from reasoning_gym.factory import DATASETS

    if task.name not in DATASETS:
        near = difflib.get_close_matches(task.name, DATASETS, n=1)
        guess = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise UserError(f"{key}.name: Reasoning Gym has no task '{task.name}'; {guess}")
    try:
        generate_item(task.name, task.params, 0)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{key}.params: {task.name} does not take them ({one_line(error)})") from None
