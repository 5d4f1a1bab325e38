"""`roll`, with roles that note what they generate and fail as told: python -m tests.integration.faulty_roles FAULTS run ...

FAULTS is "none" or classes below, with commas between them, whose roles they take the place of. All else is real; faults
are bound to an iteration or a leg, never to a time.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import cli
from flows import prefect_server as control_plane
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.roles import fleet
from roll_core.roles import worker_pool as worker_pool
from roll_core.roles.engine_role import EngineRole
from roll_core.roles.reward_role import RewardRole
from roll_core.roles.trainer_rank import TrainerRank
from roll_core.types.leg import LegAllocation, LegEnded
from roll_core.types.manifest import Collected, Updated
from roll_core.types.refs import RunRef
from roll_core.types.trajectory import Problem, Score, Trajectory

if TYPE_CHECKING:
    from roll_core.weights.broadcast import Rendezvous
    from roll_core.weights.buckets import BroadcastBucket

FAULTS, GENERATED = "ROLL_TEST_FAULTS", "ROLL_TEST_GENERATED"
"""What is to fail, and the file that seeds of generated attempts are added to, in the environment of legs and roles."""


class NotingEngine(EngineRole):
    """Leaves the seed of every attempt it makes at a training problem; no two attempts of a run have the same."""

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        with open(os.environ[GENERATED], "a") as generated:
            generated.writelines(f"{request.seed}\n" for request in requests if request.temperature > 0)
        async for completions in super().generate(requests):
            yield completions


class DyingEngine(NotingEngine):
    """One of them, the first to be asked, is killed in the middle of iteration 2."""

    async def start(self) -> None:
        await super().start()
        self._collects = 0

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        self._collects += any(request.temperature > 0 for request in requests)
        is_victim = self._collects == 2 and requests[0].temperature > 0 and is_first("victim")
        async for completions in super().generate(requests):
            if is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
            yield completions


class UnreliableReceiver(NotingEngine):
    """One of two is killed while it is sent the weights of iteration 1; when they meet again, the other does not come."""

    async def start(self) -> None:
        await super().start()
        self._loads = self._joins = 0

    async def join(self, rendezvous: "Rendezvous", rank: int) -> None:
        self._joins += 1
        if self._joins == 2 and is_first("absent"):
            await asyncio.Event().wait()
        await super().join(rendezvous, rank)

    async def load(self, bucket: "BroadcastBucket") -> int:
        self._loads += 1
        if self._loads == 3 and is_first("killed"):  # a run publishes version 0 twice
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().load(bucket)


def is_first(what: str) -> bool:
    """Of all roles that ask."""
    try:
        Path(os.environ[GENERATED]).with_name(what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class AbsentReward(RewardRole):
    """Its service is away for the second half of the problems of iteration 3."""

    async def start(self) -> None:
        await super().start()
        graded = self._reward

        async def reward(problem: Problem, trajectory: Trajectory) -> Score:
            if problem.problem_id in ("sort/train/10", "sort/train/11"):
                raise ConnectionRefusedError("judge")
            return await graded(problem, trajectory)

        self._reward = reward


class FailingTrainer(TrainerRank):
    """Cannot learn from iteration 2."""

    def update(self, collected: Collected, trajectories: list[Trajectory] | None) -> Updated:
        if collected.request.iteration == 2:
            raise ValueError("loss is not finite")
        return super().update(collected, trajectories)


def run_faulty_leg(run: RunRef, leg: int, context: dict[str, Any] | None, place: LegAllocation) -> LegEnded:
    """A leg with the roles above; the reward's service is back in the second one."""
    from flows.leg_process import run_train_leg

    faults = os.environ[FAULTS].split(",")
    engines = {"DyingEngine": DyingEngine, "UnreliableReceiver": UnreliableReceiver}
    wanted = [engine for fault, engine in engines.items() if fault in faults and leg == 1]
    worker_pool.EngineRole = wanted[0] if wanted else NotingEngine
    if "AbsentReward" in faults and leg == 1:
        worker_pool.RewardRole = AbsentReward
    if "FailingTrainer" in faults:
        fleet.TrainerRank = FailingTrainer
    return run_train_leg(run, leg, context, place)


def main(faults: str, *arguments: str) -> int:
    os.environ |= {FAULTS: faults, GENERATED: str(Path("generated.txt").absolute())}
    with control_plane.prefect_api(Path("roll-data/work")):
        from flows import rlvr  # only now: Prefect reads its settings when it is imported

        rlvr.run_train_leg = run_faulty_leg
        return cli.main(arguments)


if __name__ == "__main__":
    from tests.integration import faulty_roles  # by its name, so that legs and roles can import what they are given

    sys.exit(faulty_roles.main(*sys.argv[1:]))
