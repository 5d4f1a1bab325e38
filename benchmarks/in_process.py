"""Policy of a finished run in this process, without Ray, Prefect, MLflow or writes to a store. Not a program.

Other benchmarks use it to read weights from a checkpoint, to evaluate any weights as a run does, and to repeat iterations as
model work alone.
"""

import asyncio
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.roll_runs import FinishedRun
from roll_core.config.rollout import InFlightPolicy
from roll_core.config.run import RunConfig
from roll_core.inference.base import WeightsUpdate, adopt
from roll_core.inference.torch_engine import TorchEngine
from roll_core.roles.reward_role import RewardRole
from roll_core.rollout import metrics
from roll_core.rollout.in_process import scheduler_in_process
from roll_core.rollout.scheduler import RolloutScheduler
from roll_core.store.records.checkpoints import checkpoints_of, download_files
from roll_core.training.learner import Learner
from roll_core.types.manifest import Manifest
from roll_core.types.refs import CheckpointRef

Weights = dict[str, Tensor]
"""Tensors by Hugging Face name."""

# One process is intended here; torch.distributed.checkpoint warns about it at every load.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class ModelWork:
    """Seconds of the stages of one iteration without anything but the model work."""

    collect: float
    prepare: float
    update: float
    publish: float

    @property
    def total(self) -> float:
        return self.collect + self.prepare + self.update + self.publish


def checkpoint_at(run: FinishedRun, iteration: int) -> CheckpointRef:
    """Checkpoint of a run after an iteration."""
    (checkpoint,) = (c for c in checkpoints_of(run.store, run.chain) if c.iteration == iteration)
    return checkpoint


def open_learner(run: FinishedRun, checkpoint: CheckpointRef) -> Learner:
    """Build the learner of a trainer rank and load a checkpoint from the store."""
    learner = Learner(run.config, rank=0, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        download_files(run.store, checkpoint, Path(folder))
        learner.load(Path(folder))
    return learner


def held_out_accuracy(config: RunConfig, weights: Weights) -> float:
    """Greedy accuracy of any weights on the config's held-out problems, by the evaluation of a run."""
    return asyncio.run(_held_out_accuracy(config, weights))


async def _held_out_accuracy(config: RunConfig, weights: Weights) -> float:
    engine = _open_engine(config)
    await adopt(engine, WeightsUpdate(0, weights.items()), InFlightPolicy.FINISH)
    scheduler = _open_scheduler(config, engine)
    return metrics.accuracy(await scheduler.evaluate(config.evaluation.num_problems, config.deadlines.evaluate))


def replay_model_work(run: FinishedRun, manifests: Iterable[Manifest]) -> list[ModelWork]:
    """Repeat iterations in one process from the checkpoint of iteration 0: the same problems, seeds, batches and updates."""
    return asyncio.run(_replay(run, manifests))


async def _replay(run: FinishedRun, manifests: Iterable[Manifest]) -> list[ModelWork]:
    if run.config.algorithm.needs_reference or run.config.algorithm.kind == "distillation":
        sys.exit("the replay loads neither references nor teachers: choose an algorithm without them")
    config, engine = run.config, _open_engine(run.config)
    loop = _Loop(
        config=config,
        learner=open_learner(run, checkpoint_at(run, 0)),
        engine=engine,
        scheduler=_open_scheduler(config, engine),
    )
    await loop.publish(0)
    return [await loop.iterate(manifest) for manifest in manifests]


@dataclass(frozen=True)
class _Loop:
    """Training loop in one process."""

    config: RunConfig
    learner: Learner
    engine: TorchEngine
    scheduler: RolloutScheduler

    async def iterate(self, manifest: Manifest) -> ModelWork:
        assert manifest.collected is not None
        times = [time.perf_counter()]
        rollout = await self.scheduler.collect(manifest.collected.request, self.config.deadlines.collect)
        times.append(time.perf_counter())
        prepared = self.learner.prepare(rollout.trajectories, manifest.collected.request.weights_version)
        times.append(time.perf_counter())
        if self.config.algorithm.has_critic:
            self.learner.update_critic(prepared, manifest.iteration)
        self.learner.update(prepared, manifest.iteration)
        times.append(time.perf_counter())
        await self.publish(manifest.weights_version)
        times.append(time.perf_counter())
        return ModelWork(*(end - start for start, end in pairwise(times)))

    async def publish(self, version: int) -> None:
        await self.engine.sleep()
        await adopt(self.engine, WeightsUpdate(version, self.learner.weights()), InFlightPolicy.FINISH)


def _open_engine(config: RunConfig) -> TorchEngine:
    return TorchEngine(
        config.model,
        seed=config.seed,
        num_slots=config.rollout.slots_per_engine,
        device=torch.device(config.cluster.device.value),
        dtype=torch.float32,
    )


def _open_scheduler(config: RunConfig, engine: TorchEngine) -> RolloutScheduler:
    return scheduler_in_process(config, engine, RewardRole(config))
