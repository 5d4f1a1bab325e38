"""Small things several tests need: a tiny config, hand-made samples, a finished turn."""

import random
from pathlib import Path
from typing import Any

from roll_core.config.load import validate_config
from roll_core.config.run import RunConfig
from roll_core.types.sample import Sample
from roll_core.types.trajectory import Ending, Failure, Score, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[1]

TINY: dict[str, Any] = {
    "name": "tiny",
    "iterations": 2,
    "model": {"kind": "scratch", "max_positions": 32},
    "problems": {"kind": "arithmetic", "puzzle": "sort", "digits": 3},
    "reward": {"kind": "exact_match", "partial_credit": 0.5},
    "rollout": {"num_groups": 4, "group_size": 4, "max_new_tokens": 5},
    "training": {"optimizer": {"learning_rate": 1e-3}},
    "evaluation": {"every": 1, "num_problems": 8},
    "checkpoint": {"every": 1},
}


def tiny_config(folder: Path, **sections: Any) -> RunConfig:
    """A config small enough for a test, with everything it writes under `folder`."""
    places = {
        "store": {"uri": str(folder / "store")},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}"},
        "work_dir": str(folder / "work"),
    }
    return validate_config(TINY | places | sections, "tiny")


def random_samples(count: int, seed: int = 0) -> list[Sample]:
    """Groups of three that share a prompt, of different lengths, with random tokens."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(2, 60) for _ in range(rng.randint(2, 6))) for _ in range(-(-count // 3))]
    return [_random_sample(rng, prompts[i // 3]) for i in range(count)]


def _random_sample(rng: random.Random, prompt: tuple[int, ...]) -> Sample:
    completion = rng.randint(1, 7)
    return Sample(
        token_ids=prompt + tuple(rng.randrange(2, 60) for _ in range(completion)),
        trained=(False,) * len(prompt) + (True,) * completion,
    )


def trajectory(
    group: int, attempt: int, reward: float | None, *, prompt: int = 2, completion: int = 3, version: int = 0
) -> Trajectory:
    """A finished attempt; `reward=None` is one whose grading failed."""
    turn = Turn(
        prompt_ids=tuple(range(2, 2 + prompt)),
        completion_ids=tuple(range(10, 10 + completion)),
        sampler_logprobs=(-0.5,) * completion,
        weights_versions=(version,) * completion,
        text="x" * completion,
    )
    return Trajectory(
        problem_id=f"sort/train/{group}",
        domain="sort",
        group=group,
        attempt=attempt,
        turns=(turn,),
        ending=Ending.STOP,
        score=None if reward is None else Score(reward, reward == 1.0),
        failure=Failure("grade", "boom") if reward is None else None,
    )
