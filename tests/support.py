"""Helpers of many tests and of some benchmarks: a tiny config, random samples, a finished trajectory, deadlines."""

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from roll_core.config.load import validate_config
from roll_core.config.run import RunConfig
from roll_core.config.training.training import BackendKind
from roll_core.rollout.in_process import Grader
from roll_core.rollout.router import Grade, GradingItem
from roll_core.types.sample import Sample
from roll_core.types.trajectory import Ending, Failure, Score, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[1]
"""Root of the repository."""
MODEL_BACKENDS = (BackendKind.TORCH, BackendKind.MEGATRON)
"""Training backends that train a model; the rehearsal backend has none."""
QUIET_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
"""Environment of an MLflow server without telemetry and without processes for evaluation jobs."""
TINY_WORK: dict[str, Any] = {
    "model": {"kind": "scratch", "max_positions": 32},
    "problems": {"kind": "arithmetic", "puzzle": "sort", "digits": 3},
    "reward": {"kind": "exact_match"},
    "rollout": {"num_groups": 4, "group_size": 4, "max_new_tokens": 5},
    "evaluation": {"num_problems": 8},
}
"""Sections of the smallest work that is still a run: 16 trajectories of at most 5 tokens per iteration."""
TINY: dict[str, Any] = TINY_WORK | {
    "name": "tiny",
    "iterations": 2,
    "reward": {"kind": "exact_match", "partial_credit": 0.5},
    "training": {"optimizer": {"learning_rate": 1e-3}},
    "evaluation": {"every": 1, "num_problems": 8},
    "checkpoint": {"every": 1},
}


def tiny_config(folder: Path, **sections: Any) -> RunConfig:
    """Config small enough for a test, which writes under `folder` only; `sections` replace whole sections of `TINY`."""
    locations = {
        "store": {"uri": str(folder / "store")},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}"},
        "work_dir": str(folder / "work"),
    }
    return validate_config(TINY | locations | sections, "tiny")


def write_tiny_run(path: Path, **sections: Any) -> Path:
    """Write a run file of `TINY_WORK` on the cluster `laptop`, for the `roll` command; `sections` replace whole sections."""
    run = {"extends": str(ROOT / "configs" / "clusters" / "laptop.yaml")} | TINY_WORK | sections
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path


def random_samples(count: int, seed: int = 0) -> list[Sample]:
    """Samples of random tokens and lengths, in groups of three that share a prompt."""
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
    """Trajectory of one turn with this reward; `reward=None` is one whose grading failed. Lengths are in tokens."""
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


def patience(seconds: float) -> float:
    """Deadline for a machine without other load, extended by the load average per core and by the share of the cores that
    the host of a virtual machine may give to others: waits scale with load."""
    return 3 * seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 180.0) -> None:
    """Poll a condition; fail with `what` after the deadline, which a loaded machine extends."""
    ends_at = time.monotonic() + patience(deadline_s)
    while not condition():
        assert time.monotonic() < ends_at, f"after {patience(deadline_s):.0f} s still waiting until {what}"
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Find TCP ports that are free on 127.0.0.1 now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def grades_of(grader: Grader, items: list[GradingItem]) -> list[Grade]:
    """Grades that a grader returns, in the order of the items."""
    return asyncio.run(grades_in_order(grader, items))


async def grades_in_order(grader: Grader, items: list[GradingItem]) -> list[Grade]:
    grades = {index: grade async for grades in grader.grade(items) for index, grade in grades}
    return [grades[index] for index in range(len(items))]
