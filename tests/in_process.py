"""Training iterations in one process, without Ray: real engine, rollout scheduler, reward and learner. For tests."""

import asyncio
from itertools import count
from pathlib import Path

import torch

from roll_core.batching.samples import demonstration_sample
from roll_core.config.optimizer import WarmStartConfig
from roll_core.config.rollout import InFlightPolicy
from roll_core.config.run import RunConfig
from roll_core.data.problem_source import build_source
from roll_core.inference.base import WeightsUpdate, adopt
from roll_core.inference.torch_engine import TorchEngine
from roll_core.roles.reward_role import RewardRole
from roll_core.rollout.in_process import scheduler_in_process
from roll_core.rollout.renderer import build_renderer
from roll_core.training.learner import Learner
from roll_core.types.manifest import CollectRequest, Metrics
from roll_core.types.sample import Sample
from roll_core.types.trajectory import Trajectory
from tests.support import tiny_config


class InProcessLoop:
    """Training loop whose engine may have another config (`engine_config`) or dtype than the learner."""

    def __init__(
        self, config: RunConfig, *, engine_config: RunConfig | None = None, engine_dtype: torch.dtype = torch.float32
    ):
        self._config = config
        self._engine_config = engine_config or config
        self._engine_dtype = engine_dtype
        self.learner = Learner(config, rank=0, device=torch.device("cpu"))
        self.learner.build_teachers()
        self._iterations = count(1)

    def iterate(self) -> Metrics:
        """Publish, collect, prepare, update the critic if there is one, and update; return all metrics."""
        iteration = next(self._iterations)
        prepared = self.learner.prepare(asyncio.run(self._collect(iteration)), weights_version=iteration - 1)
        critic = self.learner.update_critic(prepared, iteration) if self._config.algorithm.has_critic else {}
        return prepared.metrics | critic | self.learner.update(prepared, iteration)

    async def _collect(self, iteration: int) -> list[Trajectory]:
        config = self._engine_config
        # A new engine every iteration, since asyncio's primitives belong to the event loop in which they were created.
        engine = TorchEngine(config.model, seed=0, num_slots=64, device=torch.device("cpu"), dtype=self._engine_dtype)
        if config.training.routing.replay:
            engine.record_experts()
        await adopt(engine, WeightsUpdate(iteration - 1, self.learner.weights()), InFlightPolicy.FINISH)
        scheduler = scheduler_in_process(config, engine, RewardRole(config))
        groups = config.rollout.num_groups
        request = CollectRequest(
            iteration=iteration,
            parent="",
            weights_version=iteration - 1,
            first_problem=(iteration - 1) * groups,
            num_groups=groups,
        )
        return (await scheduler.collect(request, 60.0)).trajectories


def warm_checkpoint(folder: Path) -> Path:
    """Train a policy by imitation until its answers are digits, so that rewards vary; return its checkpoint folder."""
    config = tiny_config(folder)
    source, renderer = build_source(config.problems, 0), build_renderer(config.model)

    def demonstrations(step: int) -> list[Sample]:
        drawn = [source.demonstration(32 * step + i) for i in range(32)]
        return [demonstration_sample(renderer.prompt(d.problem.messages), renderer.completion(d.completion)) for d in drawn]

    learner = InProcessLoop(config).learner
    learner.imitate(demonstrations, WarmStartConfig().optimizer, 30)
    learner.snapshot()(folder / "checkpoint")
    return folder / "checkpoint"
