"""One rank of the trainer: holds a learner and its share of the prepared batch, and answers repeated requests once.

All ranks get the same calls in the same order. What changes state carries a request id; a repeated id gets the old answer.
"""

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from roll_core.config.algorithm.methods import Distillation
from roll_core.config.run import RunConfig
from roll_core.data.ledger import draws_of
from roll_core.errors import RollError
from roll_core.host import ANY_ADDRESS, free_port
from roll_core.roles.process import settle
from roll_core.roles.ray_weights import RayWeights
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_of, download_files, upload_files
from roll_core.store.records.rollouts import decode_trajectories
from roll_core.store.records.runs import read_chain
from roll_core.types.manifest import Collected, Metrics, Prepared, Updated
from roll_core.types.refs import CheckpointFile, CheckpointRef, RunRef, WeightsRef
from roll_core.types.sample import Sample
from roll_core.types.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.training.base import Snapshot
    from roll_core.training.learner import PreparedBatch
    from roll_core.weights.broadcast import Rendezvous, Sender
    from roll_core.weights.buckets import BroadcastBucket, DeviceBucket, TensorEntry
    from roll_core.weights.checks import WeightsCheck

Result = TypeVar("Result")
BESIDE = "beside"
"""Calls of this group run in a thread of their own, beside the others."""
ANSWERS_KEPT = 16
"""A request is repeated, if at all, before the next iteration; this covers several."""


class TrainerRank:
    def __init__(self, config: RunConfig, run: RunRef, scratch: Path, rank: int, num_ranks: int):
        self._config = config
        self._run_id = run.run_id
        self._store = ObjectStore(run.store_uri, config.store.retry_seconds)
        self._scratch = scratch
        self._rank = rank
        self._num_ranks = num_ranks
        self._prepared: dict[str, PreparedBatch] = {}
        self._answers: dict[str, Any] = {}
        self._snapshot: Snapshot | None = None
        self._sender: Sender | None = None
        self._laid_out: Iterator[tuple[tuple[TensorEntry, ...], Tensor]] = iter(())

    def meeting_point(self) -> str:
        """Where the ranks of this trainer can meet: this node, a free port."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port(ANY_ADDRESS)}"

    def start(self, meeting_point: str) -> None:
        """Join the other ranks and build what learns."""
        from roll_core.models.lean_import import import_models

        import_models()
        import torch

        from roll_core.training.learner import Learner
        from roll_core.weights.stored import WeightsWriter

        torch.set_num_threads(self._config.cluster.threads_per_device)
        device = torch.device(self._config.cluster.device.value)
        if self._num_ranks > 1:
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                init_method=meeting_point,
                rank=self._rank,
                world_size=self._num_ranks,
            )
        self._learner = Learner(self._config, rank=self._rank, device=device)
        self._load_teachers()
        self._engine_dtype = torch.bfloat16 if self._config.engines_in_bfloat16 else torch.float32
        self._writer = WeightsWriter(self._store, self._run_id, self._config.weights.full_every, self._engine_dtype)
        settle()

    def warm_start(self, request_id: str) -> Metrics:
        """Supervised steps on demonstrations before the first iteration."""
        return self._once(request_id, self._warm_start)

    def restore(self, checkpoint: CheckpointRef, first_checkpoint: CheckpointRef) -> None:
        """Continue from a checkpoint; the reference policy, if the algorithm needs one, is where the run began."""
        from roll_core.training.base import Policy

        if self._learner.needs_reference:
            self._with_folder(first_checkpoint, partial(self._learner.load_frozen, Policy.REFERENCE))
        self._with_folder(checkpoint, self._learner.load)

    def prepare(self, collected: Collected, trajectories: list[Trajectory] | None) -> Prepared:
        """Declared signals, advantages, packing. Keeps this rank's share; answers for all of them.

        `trajectories` is None when they are only in the store (a receipt that outlived its roles).
        """
        trajectories = trajectories or decode_trajectories(self._store.get(collected.trajectories))
        prepared = self._learner.prepare(trajectories, collected.request.weights_version)
        self._prepared = {collected.request.request_id: prepared}
        return Prepared(
            collected=collected,
            draws=draws_of(collected, trajectories, prepared.trained_groups),
            num_samples=prepared.num_samples,
            num_trained_tokens=prepared.num_trained_tokens,
            metrics=prepared.metrics,
        )

    def update(self, collected: Collected, trajectories: list[Trajectory] | None) -> Updated:
        """All optimizer steps of the policy over the prepared batch (prepared here if this rank is new)."""
        request = collected.request

        def steps() -> Updated:
            metrics = self._learner.update(self._prepared_batch(collected, trajectories), request.iteration) | _peak_memory()
            del self._prepared[request.request_id]
            return Updated(
                iteration=request.iteration,
                weights_version=request.weights_version + 1,
                controllers=self._learner.controllers,
                metrics=metrics,
            )

        return self._once(f"update/{request.request_id}", steps)

    def update_critic(self, collected: Collected, trajectories: list[Trajectory] | None) -> Metrics:
        """All optimizer steps of the critic over the prepared batch, before the policy's."""

        def steps() -> Metrics:
            return self._learner.update_critic(self._prepared_batch(collected, trajectories), collected.request.iteration)

        return self._once(f"update_critic/{collected.request.request_id}", steps)

    def bucket_weights(self, version: int) -> RayWeights | None:
        """The current weights in the object store, under this number; rank 0 answers, the others help."""
        from roll_core.weights.buckets import pack

        if self._rank != 0:
            self._help_to_gather()
            return None
        references = tuple(ray.put(bucket) for bucket in pack(self._watched(version)))
        return RayWeights(version, references, ray.put(self._watch.check), self._digest.hexdigest())

    def share_in_place(self, version: int) -> tuple["DeviceBucket", "WeightsCheck"]:
        """All weights where they lie, under this number, for an engine on this rank's GPU, and what it compares with; where
        this rank has them all."""
        from roll_core.weights.buckets import share_in_place
        from roll_core.weights.checks import check_in_place

        weights = list(self._learner.weights())
        return share_in_place(weights), check_in_place(version, weights)

    def digest(self) -> str:
        """Of the weights, where this rank has them all: no engine waits for it."""
        from roll_core.weights.digests import WeightsDigest

        digest = WeightsDigest()
        digest.add(list(self._learner.weights()))
        return digest.hexdigest()

    def store_weights(self, version: int) -> WeightsRef | None:
        """The current weights in the store, under this number; rank 0 answers, the others help."""
        if self._rank != 0:
            self._help_to_gather()
            return None
        return self._writer.write(version, self._learner.weights())

    def begin_sharing(self, version: int) -> None:
        """From now on `share_bucket` gives the weights, under this number, to engines on this rank's GPU."""
        from roll_core.weights.buckets import pack_on_device

        self._shared = pack_on_device(self._watched(version), self._engine_dtype)

    def share_bucket(self) -> "DeviceBucket | None":
        """The next of them, once nobody needs the one before it; None when there are no more."""
        return next(self._shared, None)

    def finish_sharing(self) -> tuple["WeightsCheck", str]:
        """What engines compare with, and the digest of the weights."""
        return self._watch.check, self._digest.hexdigest()

    def offload(self) -> None:
        """Give the GPU's memory to the engine that is there, too."""
        self._learner.offload()

    def reload(self) -> None:
        self._learner.reload()

    def open_group(self, engines: tuple[str, ...]) -> "Rendezvous":
        """Rank 0: a place where engines can meet, which are then broadcast to; who met before parts."""
        import torch

        from roll_core.weights.broadcast import Sender

        self.leave_group()
        device, members = torch.device(self._config.cluster.device.value), ("trainer rank 0", *engines)
        host, patience_s = ray.util.get_node_ip_address(), self._config.weights.broadcast_seconds
        self._sender = Sender(host, members, patience_s, device)
        return self._sender.meeting

    def meet_engines(self) -> None:
        """Rank 0: wait until all are there."""
        assert self._sender is not None
        self._sender.meet()

    def begin_broadcast(self, version: int) -> "BroadcastBucket | None":
        """Rank 0 answers the first bucket that `broadcast` will send; the others help until the last."""
        from roll_core.weights.buckets import lay_out

        if self._rank != 0:
            self._help_to_gather()
            return None
        self._laid_out = lay_out(self._watched(version), self._engine_dtype)
        return self._lay_out_next()

    def broadcast(self) -> "BroadcastBucket | None":
        """Rank 0: send a bucket to all engines; the next one, which is in the same memory, or None after the last."""
        assert self._sender is not None
        self._sender.send(self._flat)
        return self._lay_out_next()

    def leave_group(self) -> tuple[str, ...]:
        """Rank 0: no more broadcasts; engines that were waited for last and did not come."""
        deque(self._laid_out, maxlen=0)  # other ranks are in the middle of gathering, if a broadcast broke off
        sender, self._sender = self._sender, None
        if sender is None:
            return ()
        sender.close()
        return sender.late

    def export(self, folder: Path) -> str:
        """The current policy as a Hugging Face folder; ranks write shards in turn, and rank 0 answers the digest of all."""
        from roll_core.models.export import write_folder
        from roll_core.models.tensor_files import WriterRank
        from roll_core.weights.digests import WeightsDigest

        digest, weights = WeightsDigest(), self._learner.weights()
        if self._rank == 0:
            weights = digest.over(weights)
        write_folder(self._config.model, weights, folder, turn=WriterRank(self._rank, self._num_ranks))
        return digest.hexdigest()

    def copy_state(self) -> None:
        """Copy everything learning goes on from; the rank is free again once that is done."""
        self._snapshot = self._learner.snapshot()

    @ray.method(concurrency_group=BESIDE)
    def store_copy(self, iteration: int) -> list[CheckpointFile]:
        """Write the copy to disk and from there to the store, beside training; the files this rank wrote."""
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None, "nothing was copied"
        folder = self._scratch / f"checkpoint-{iteration}"
        return upload_files(self._store, folder, snapshot(folder))

    def _watched(self, version: int) -> "Iterator[tuple[str, Tensor]]":
        """The weights; what they are is known once all of them have gone by."""
        from roll_core.weights.checks import Watch
        from roll_core.weights.digests import WeightsDigest

        self._watch, self._digest = Watch(version), WeightsDigest()
        return self._watch.over(self._digest.over(self._learner.weights()))

    def _lay_out_next(self) -> "BroadcastBucket | None":
        from roll_core.weights.buckets import BroadcastBucket

        laid_out = next(self._laid_out, None)
        if laid_out is None:
            return None
        entries, self._flat = laid_out
        return BroadcastBucket(entries, len(self._flat))

    def _help_to_gather(self) -> None:
        """Take part in gathering weights that another rank keeps."""
        for _ in self._learner.weights():
            pass

    def _once(self, request_id: str, act: Callable[[], Result]) -> Result:
        if request_id not in self._answers:
            self._answers[request_id] = act()
            for forgotten in list(self._answers)[:-ANSWERS_KEPT]:
                del self._answers[forgotten]
        return self._answers[request_id]

    def _prepared_batch(self, collected: Collected, trajectories: list[Trajectory] | None) -> "PreparedBatch":
        if collected.request.request_id not in self._prepared:
            self.prepare(collected, trajectories)
        return self._prepared[collected.request.request_id]

    def _warm_start(self) -> Metrics:
        from roll_core.batching.samples import demonstration_sample
        from roll_core.data.problem_source import build_source
        from roll_core.rollout.renderer import build_renderer

        config, plan = self._config, self._config.warm_start
        assert plan is not None
        source, renderer = build_source(config.problems, config.seed), build_renderer(config.model)

        def demonstrations(step: int) -> list[Sample]:
            shown = (source.demonstration(step * plan.batch_size + i) for i in range(plan.batch_size))
            return [
                demonstration_sample(renderer.prompt(d.problem.messages), renderer.completion(d.completion)) for d in shown
            ]

        return {"warm_start/loss": self._learner.imitate(demonstrations, plan.optimizer, plan.steps)}

    def _load_teachers(self) -> None:
        from roll_core.training.learner import teacher_name

        self._learner.build_teachers()
        if isinstance(self._config.algorithm, Distillation):
            for number, teacher in enumerate(self._config.algorithm.teachers):
                if teacher.kind == "run":
                    assert teacher.iteration is not None, "teachers are pinned when a run is opened"
                    checkpoint = checkpoint_of(self._store, teacher.run_id, teacher.iteration)
                    self._with_folder(checkpoint, partial(self._learner.load_frozen, teacher_name(number)))

    def _with_folder(self, checkpoint: CheckpointRef, load: Callable[[Path], None]) -> None:
        folder = self._scratch / f"restore-{checkpoint.iteration}-rank-{self._rank}"
        download_files(self._store, checkpoint, folder)
        load(folder)
        shutil.rmtree(folder)


def _peak_memory() -> Metrics:
    """Most of the GPU's memory that was in use since this was asked last, where there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {"update/peak_memory_gb": peak / 1e9}


def checkpoint_of(store: ObjectStore, run_id: str, iteration: int) -> CheckpointRef:
    for checkpoint in checkpoints_of(store, read_chain(store, run_id)):
        if checkpoint.iteration == iteration:
            return checkpoint
    raise RollError(f"run {run_id} in {store.uri} has no checkpoint of iteration {iteration} to learn from")
