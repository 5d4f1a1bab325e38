"""One rank of the trainer: holds a shard of the policy, its share of the prepared batch, and answers repeated requests once.

All ranks get the same calls in the same order. What changes state carries a request id; a repeated id gets the old answer.
"""

import shutil
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from roll_core.batching.packing import PackingLimits
from roll_core.config.run import RunConfig
from roll_core.config.training import Packing
from roll_core.roles.process import settle
from roll_core.store.checkpoints import download_files, upload_files
from roll_core.store.object_store import ObjectStore
from roll_core.store.rollouts import decode_trajectories
from roll_core.types.manifest import Collected, Metrics
from roll_core.types.refs import CheckpointFile, CheckpointRef
from roll_core.types.sample import Sample
from roll_core.types.trajectory import Trajectory

if TYPE_CHECKING:
    from roll_core.batching.micro_batch import MicroBatch
    from roll_core.training.base import TrainingBackend

Answer = TypeVar("Answer")
ANSWERS_KEPT = 16
"""A request is repeated, if at all, before the next iteration; this covers several."""


class TrainerRank:
    def __init__(self, config: RunConfig, store_uri: str, scratch: Path, rank: int, num_ranks: int):
        self._config = config
        self._store = ObjectStore(store_uri)
        self._scratch = scratch
        self._rank = rank
        self._num_ranks = num_ranks
        self._prepared: dict[str, list[list[MicroBatch]]] = {}
        self._answers: dict[str, Any] = {}

    def meeting_point(self) -> str:
        """Where the ranks of this trainer can meet: this node, a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, meeting_point: str) -> None:
        """Join the other ranks and build the policy."""
        import torch

        from roll_core.algorithms.catalog import build_algorithm
        from roll_core.training.torch_backend import TorchBackend

        config = self._config
        torch.set_num_threads(config.cluster.threads_per_device)
        device = torch.device(config.cluster.device.value)
        if self._num_ranks > 1:
            torch.distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=meeting_point,
                rank=self._rank,
                world_size=self._num_ranks,
            )
        self._algorithm = build_algorithm(config.algorithm, config.training.optimizer_steps)
        self._backend: TrainingBackend = TorchBackend(
            config.model, config.training, seed=config.seed, temperature=config.rollout.temperature, device=device
        )
        self._backend.start_optimizer(config.training.optimizer, config.total_optimizer_steps)
        settle()

    def warm_start(self, request_id: str) -> Metrics:
        """Supervised steps on demonstrations, then a fresh optimizer for reinforcement learning."""
        return self._once(request_id, self._warm_start)

    def restore(self, checkpoint: CheckpointRef, first_checkpoint: CheckpointRef) -> None:
        """Continue from a checkpoint; the reference policy, if the algorithm needs one, is where the run began."""
        from roll_core.algorithms.catalog import Signal

        if Signal.REFERENCE in self._algorithm.signals:
            self._with_folder(first_checkpoint, self._backend.load_reference)
        self._with_folder(checkpoint, self._backend.load)

    def prepare(self, collected: Collected, trajectories: list[Trajectory] | None) -> tuple[int, int]:
        """Advantages, declared signals, packing. Keeps this rank's share; answers samples and trained tokens of the whole.

        `trajectories` is None when they are only in the store (a receipt that outlived its roles).
        """
        from roll_core.batching.samples import build_samples

        trajectories = trajectories or decode_trajectories(self._store.get(collected.trajectories))
        samples = build_samples(trajectories, self._algorithm.advantage)
        steps = _split_evenly(samples, self._config.training.optimizer_steps)
        self._prepared = {collected.request.request_id: [self._prepare_step(step) for step in steps]}
        return len(samples), sum(s.num_trained_tokens for s in samples)

    def update(self, collected: Collected, trajectories: list[Trajectory] | None) -> Metrics:
        """All optimizer steps of an iteration over the prepared batch (prepared here if this rank is new)."""

        def steps() -> Metrics:
            if collected.request.request_id not in self._prepared:
                self.prepare(collected, trajectories)
            return self._update(self._prepared.pop(collected.request.request_id))

        return self._once(f"update/{collected.request.request_id}", steps)

    def bucket_weights(self) -> list[ray.ObjectRef]:
        """The current weights in the object store, as references; rank 0 answers, the others help to gather."""
        from roll_core.weights.buckets import pack

        if self._rank == 0:
            return [ray.put(bucket) for bucket in pack(self._backend.weights())]
        for _ in self._backend.weights():
            pass
        return []

    def checkpoint(self, iteration: int) -> list[CheckpointFile]:
        """Save weights and optimizer state; the files this rank wrote, already in the store."""

        def save() -> list[CheckpointFile]:
            folder = self._scratch / f"checkpoint-{iteration}"
            files = upload_files(self._store, self._backend.save(folder))
            for file in files:
                (folder / file.name).unlink()
            return files

        return self._once(f"checkpoint/{iteration}", save)

    def _once(self, request_id: str, act: Callable[[], Answer]) -> Answer:
        if request_id not in self._answers:
            self._answers[request_id] = act()
            for forgotten in list(self._answers)[:-ANSWERS_KEPT]:
                del self._answers[forgotten]
        return self._answers[request_id]

    def _warm_start(self) -> Metrics:
        from roll_core.algorithms.losses import cross_entropy
        from roll_core.batching.demonstrations import as_sample
        from roll_core.data.problem_source import build_source
        from roll_core.rollout.renderer import build_renderer

        config, plan = self._config, self._config.warm_start
        assert plan is not None
        source, renderer = build_source(config.problems, config.seed), build_renderer(config.model)
        self._backend.start_optimizer(plan.optimizer, plan.steps)
        # Demonstrations share no prompts: rows as short as they can be cost the least attention.
        limits = PackingLimits(config.training.micro_batch_tokens, None, Packing.ROWS)
        metrics: Metrics = {}
        for step in range(plan.steps):
            demonstrations = [source.demonstration(step * plan.batch_size + i) for i in range(plan.batch_size)]
            samples = [
                as_sample(renderer.prompt(d.problem.messages), renderer.completion(d.completion)) for d in demonstrations
            ]
            for micro_batch in self._micro_batches(samples, limits, skip_zero_advantages=False):
                self._backend.accumulate(micro_batch, cross_entropy)
            metrics = self._backend.apply_gradients()
        self._backend.start_optimizer(config.training.optimizer, config.total_optimizer_steps)
        return {"warm_start/loss": metrics["update/loss"]}

    def _prepare_step(self, samples: list[Sample]) -> list["MicroBatch"]:
        from roll_core.algorithms.catalog import Signal
        from roll_core.training.base import Policy

        training, signals = self._config.training, self._algorithm.signals
        limits = PackingLimits(training.micro_batch_tokens, training.row_tokens, training.packing)
        skip_zero_advantages = self._algorithm.skips_zero_advantages
        return [
            micro_batch.with_signals(
                anchor=self._backend.logprobs(micro_batch, Policy.CURRENT) if Signal.ANCHOR in signals else None,
                reference=self._backend.logprobs(micro_batch, Policy.REFERENCE) if Signal.REFERENCE in signals else None,
            )
            for micro_batch in self._micro_batches(samples, limits, skip_zero_advantages=skip_zero_advantages)
        ]

    def _micro_batches(
        self, samples: list[Sample], limits: PackingLimits, *, skip_zero_advantages: bool
    ) -> list["MicroBatch"]:
        from roll_core.batching.micro_batch import build_micro_batches

        return build_micro_batches(
            samples,
            rank=self._rank,
            num_ranks=self._num_ranks,
            limits=limits,
            skip_zero_advantages=skip_zero_advantages,
        )

    def _update(self, steps: list[list["MicroBatch"]]) -> Metrics:
        per_step: list[Metrics] = []
        for micro_batches in steps:
            for micro_batch in micro_batches:
                self._backend.accumulate(micro_batch, self._algorithm.loss)
            per_step.append(self._backend.apply_gradients())
        names = dict.fromkeys(name for metrics in per_step for name in metrics)
        return {name: mean(metrics[name] for metrics in per_step if name in metrics) for name in names}

    def _with_folder(self, checkpoint: CheckpointRef, load: Callable[[Path], None]) -> None:
        folder = self._scratch / f"restore-{checkpoint.iteration}-rank-{self._rank}"
        download_files(self._store, checkpoint, folder)
        load(folder)
        shutil.rmtree(folder)


def _split_evenly(samples: list[Sample], parts: int) -> list[list[Sample]]:
    """Consecutive parts whose sizes differ by at most one; whole groups stay together when none of them failed."""
    bounds = [len(samples) * part // parts for part in range(parts + 1)]
    return [samples[start:end] for start, end in pairwise(bounds) if end > start]
