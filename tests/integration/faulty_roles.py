"""Roles that record what they generate, and roles that fail at a chosen iteration or leg, never at a time.

In the test's process: `use(monkeypatch, DyingEngine)`. For a command whose legs are other processes:
`python -m tests.integration.faulty_roles FAULTS run ...`, where FAULTS is "none" or names of classes below with commas.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import cli, prefect_server
from roll_core.config.run import RunConfig
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.roles import fleet, worker_pool
from roll_core.roles.engine_role import EngineRole
from roll_core.roles.process import names_device
from roll_core.roles.rehearsal_rank import RehearsalRank
from roll_core.roles.reward_role import RewardRole
from roll_core.types.leg import LegAllocation, LegEnded
from roll_core.types.manifest import Collected, Updated
from roll_core.types.refs import RunRef
from roll_core.types.trajectory import Problem, Score, Trajectory

if TYPE_CHECKING:
    import pytest

    from roll_core.weights.broadcast import Rendezvous
    from roll_core.weights.buckets import BroadcastBucket

FAULTS = "ROLL_TEST_FAULTS"
"""Environment variable of a leg's process: names of the faulty roles, with commas."""


class RecordingEngine(EngineRole):
    """Appends the seed of every training attempt to generated.txt; no two attempts of a run have the same seed."""

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        with open(workspace_folder(self._config) / "generated.txt", "a") as generated:
            generated.writelines(f"{request.seed}\n" for request in requests if request.temperature > 0)
        async for completions in super().generate(requests):
            yield completions


class DyingEngine(RecordingEngine):
    """The first engine to be asked in iteration 2 is killed in the middle of it."""

    async def start(self) -> None:
        await super().start()
        self._collects = 0

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        self._collects += any(request.temperature > 0 for request in requests)
        is_victim = self._collects == 2 and requests[0].temperature > 0 and is_first(self._config, "victim")
        async for completions in super().generate(requests):
            if is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
            yield completions


class UnreliableReceiver(RecordingEngine):
    """One of two engines is killed while it receives the weights of iteration 1; the other does not join the next group."""

    async def start(self) -> None:
        await super().start()
        self._loads = self._joins = 0

    async def join(self, rendezvous: "Rendezvous", rank: int) -> None:
        self._joins += 1
        if self._joins == 2 and is_first(self._config, "absent"):
            await asyncio.Event().wait()
        await super().join(rendezvous, rank)

    async def load(self, bucket: "BroadcastBucket") -> int:
        self._loads += 1
        if self._loads == 3 and is_first(self._config, "killed"):  # a run publishes version 0 twice
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().load(bucket)


class AbsentReward(RewardRole):
    """The reward's service is away for the second half of the problems of iteration 3."""

    async def start(self) -> None:
        await super().start()
        graded = self._reward

        async def reward(problem: Problem, trajectory: Trajectory) -> Score:
            if problem.problem_id in ("sort/train/10", "sort/train/11"):
                raise ConnectionRefusedError("judge")
            return await graded(problem, trajectory)

        self._reward = reward


class DeadlyReward(RewardRole):
    """The reward ends its process at the second attempt at one problem."""

    async def start(self) -> None:
        await super().start()
        graded = self._reward

        async def reward(problem: Problem, trajectory: Trajectory) -> Score:
            if problem.messages[0].text == "21>" and trajectory.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return await graded(problem, trajectory)

        self._reward = reward


class FailingTrainer(RehearsalRank):
    """Rehearsing trainer rank whose update of iteration 2 raises."""

    def update(self, collected: Collected, trajectories: list[Trajectory] | None) -> Updated:
        if collected.request.iteration == 2:
            raise ValueError("loss is not finite")
        return super().update(collected, trajectories)


@names_device
class BrokenGpuTrainer(RehearsalRank):
    """Rehearsing trainer rank whose update of iteration 2 fails like one on a broken GPU."""

    def update(self, collected: Collected, trajectories: list[Trajectory] | None) -> Updated:
        if collected.request.iteration == 2:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return super().update(collected, trajectories)


def workspace_folder(config: RunConfig) -> Path:
    """Folder of the test's workspace, whose work folder is roll-data/work."""
    return Path(config.work_dir).parents[1]


def is_first(config: RunConfig, what: str) -> bool:
    """True for the first role of a workspace that asks, which leaves a file of that name."""
    try:
        (workspace_folder(config) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def use(monkeypatch: "pytest.MonkeyPatch", *roles: type) -> None:
    """Substitute roles for their base classes in legs of this process."""
    for role in roles:
        if issubclass(role, EngineRole):
            monkeypatch.setattr(worker_pool, "EngineRole", role)
        elif issubclass(role, RewardRole):
            monkeypatch.setattr(worker_pool, "RewardRole", role)
        else:
            monkeypatch.setattr(fleet, "RehearsalRank", role)


def run_faulty_leg(run: RunRef, leg: int, context: dict[str, Any] | None, allocation: LegAllocation) -> LegEnded:
    """Entry point of a leg with faulty roles."""
    from flows.leg_process import run_train_leg

    worker_pool.EngineRole = RecordingEngine
    if "FailingTrainer" in os.environ[FAULTS].split(","):
        fleet.RehearsalRank = FailingTrainer
    return run_train_leg(run, leg, context, allocation)


def main(faults: str, *arguments: str) -> int:
    """Run a `roll` command whose legs have faulty roles."""
    os.environ[FAULTS] = faults
    with prefect_server.prefect_api(Path("roll-data/work")):
        from flows import rlvr  # only now: Prefect reads its settings when it is imported

        rlvr.run_train_leg = run_faulty_leg
        return cli.main(arguments)


if __name__ == "__main__":
    from tests.integration import faulty_roles  # by its name, so that legs and roles can import these classes

    sys.exit(faulty_roles.main(*sys.argv[1:]))
