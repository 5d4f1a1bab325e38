"""Trainer rank as a Ray actor: holds a learner and its share of the prepared batch.

All ranks get the same calls in the same order. A call that changes state carries a request id and is idempotent: a repeated
id returns the first result.
"""

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from roll_core.config.algorithm.methods import Distillation
from roll_core.config.run import RunConfig
from roll_core.data.ledger import resolve_draws
from roll_core.errors import ArtifactDamaged, RollError
from roll_core.host import ANY_ADDRESS, free_port
from roll_core.roles.process import freeze_garbage_collector, names_device
from roll_core.roles.ray_weights import RayWeights
from roll_core.store.object_store import ObjectStore, object_name
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
    from roll_core.weights.broadcast import BroadcastSender, Rendezvous
    from roll_core.weights.buckets import BroadcastBucket, DeviceBucket, TensorEntry
    from roll_core.weights.checks import WeightsCheck

Result = TypeVar("Result")
BACKGROUND = "background"
"""Ray concurrency group whose calls run in a thread of their own, concurrently with the others."""
RESULTS_KEPT = 16
"""Results kept for repeated requests. A request is repeated, if at all, before the next iteration; 16 covers several."""


@names_device
class TrainerRank:
    """Ray actor of one trainer rank.

    Methods that gather weights are called on all ranks at once. Rank 0 returns the result; the others only take part in the
    collectives.
    """

    def __init__(self, config: RunConfig, run: RunRef, scratch: Path, rank: int, num_ranks: int):
        self._config = config
        self._run_id = run.run_id
        self._store = ObjectStore(run.store_uri, config.store.retry_seconds)
        self._scratch = scratch
        self._rank = rank
        self._num_ranks = num_ranks
        self._prepared: dict[str, PreparedBatch] = {}
        """Prepared batch by request id; at most one."""
        self._results: dict[str, Any] = {}
        """Results of calls that changed state, by request id."""
        self._snapshot: Snapshot | None = None
        """Writes the training state that `snapshot_state` copied; None once it is stored."""
        self._sender: BroadcastSender | None = None
        """Rank 0 of the broadcast group; None without a group, and on other trainer ranks."""
        self._unsent: Iterator[tuple[tuple[TensorEntry, ...], Tensor]] = iter(())
        """Packed buckets of the current broadcast that are not sent yet."""

    def rendezvous_address(self) -> str:
        """Address where the trainer ranks can form their process group: this node, a free port.
        Example: tcp://10.0.0.7:41234"""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port(ANY_ADDRESS)}"

    def start(self, rendezvous_address: str) -> None:
        """Join the process group of the trainer ranks, build the learner and load its teachers."""
        from roll_core.models.lean_import import import_models

        import_models()
        import torch

        from roll_core.models.determinism import make_deterministic
        from roll_core.training.learner import Learner
        from roll_core.weights.stored import WeightsWriter

        torch.set_num_threads(self._config.cluster.threads_per_device)
        if self._config.training.deterministic:
            make_deterministic()
        device = torch.device(self._config.cluster.device.value)
        if self._num_ranks > 1:
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                init_method=rendezvous_address,
                rank=self._rank,
                world_size=self._num_ranks,
            )
        self._learner = Learner(self._config, rank=self._rank, device=device)
        self._load_teachers()
        self._engine_dtype = torch.bfloat16 if self._config.engines_in_bfloat16 else torch.float32
        self._writer = WeightsWriter(self._store, self._run_id, self._config.weights.full_every, self._engine_dtype)
        freeze_garbage_collector()

    def warm_start(self, request_id: str) -> Metrics:
        """Run supervised steps on demonstrations, before the first iteration; return their loss."""
        return self._idempotent(request_id, self._warm_start)

    def fetch(self, checkpoint: CheckpointRef) -> None:
        """Download a checkpoint into a folder of this rank, from which `restore` loads it, and verify every file. Folders of
        earlier fetches are deleted."""
        for left in self._scratch.glob(f"restore-*-rank-{self._rank}"):
            shutil.rmtree(left)
        download_files(self._store, checkpoint, self._restore_folder(checkpoint))
        for file in checkpoint.files:
            if PurePosixPath(file.name).name == ".metadata":
                self._check_metadata(file, self._restore_folder(checkpoint))

    def restore(self, checkpoint: CheckpointRef) -> None:
        """Load a fetched checkpoint, and delete what was fetched."""
        self._learner.load(self._restore_folder(checkpoint))
        shutil.rmtree(self._restore_folder(checkpoint))

    def load_reference(self, checkpoint: CheckpointRef) -> None:
        """Load the policy of a fetched checkpoint as the frozen reference, and delete what was fetched."""
        from roll_core.training.base import Policy

        self._learner.load_frozen(Policy.REFERENCE, self._restore_folder(checkpoint))
        shutil.rmtree(self._restore_folder(checkpoint))

    def prepare(self, collected: Collected, trajectories: list[Trajectory] | None) -> Prepared:
        """Compute the signals that the algorithm needs (logprobs, values), advantages and packing of a batch. Keep this
        rank's share in memory; the returned `Prepared` covers the whole batch.

        `trajectories` is None if they are only in the store: they were collected by roles of an earlier leg.
        """
        trajectories = trajectories or decode_trajectories(self._store.get(collected.trajectories))
        prepared = self._learner.prepare(trajectories, collected.request.weights_version)
        self._prepared = {collected.request.request_id: prepared}
        return Prepared(
            collected=collected,
            draws=resolve_draws(collected, trajectories, prepared.trained_groups),
            num_samples=prepared.num_samples,
            num_trained_tokens=prepared.num_trained_tokens,
            metrics=prepared.metrics,
        )

    def update(self, collected: Collected, trajectories: list[Trajectory] | None) -> Updated:
        """Run all optimizer steps of the policy over the prepared batch; prepare it first if this rank does not have it."""
        request = collected.request

        def steps() -> Updated:
            metrics = self._learner.update(self._prepared_batch(collected, trajectories), request.iteration)
            del self._prepared[request.request_id]
            return Updated(
                iteration=request.iteration,
                weights_version=request.weights_version + 1,
                controllers=self._learner.controllers,
                metrics=metrics | self._memory_metrics(),
            )

        return self._idempotent(f"update/{request.request_id}", steps)

    def update_critic(self, collected: Collected, trajectories: list[Trajectory] | None) -> Metrics:
        """Run all optimizer steps of the critic over the prepared batch, before the policy's; return their metrics."""

        def steps() -> Metrics:
            return self._learner.update_critic(self._prepared_batch(collected, trajectories), collected.request.iteration)

        return self._idempotent(f"update_critic/{collected.request.request_id}", steps)

    def put_in_object_store(self, version: int) -> RayWeights | None:
        """Put the current weights into Ray's object store under this version number; rank 0 returns the references."""
        from roll_core.weights.buckets import pack

        if self._rank != 0:
            self._join_gather()
            return None
        references = tuple(ray.put(bucket) for bucket in pack(self._observed_weights(version)))
        return RayWeights(version, references, ray.put(self._check_recorder.check), self._digest.hexdigest())

    def share_in_place(self, version: int) -> tuple["DeviceBucket", "WeightsCheck"]:
        """Share all weights in place under this version number with an engine on this rank's GPU; also return the check that
        the engine compares them with. Only for a rank that holds all weights."""
        from roll_core.weights.buckets import share_in_place
        from roll_core.weights.checks import check_in_place

        weights = list(self._learner.weights())
        return share_in_place(weights), check_in_place(version, weights)

    def digest(self) -> str:
        """Digest of the weights, for a rank that holds all weights. Computed while the engine loads them."""
        from roll_core.weights.digests import WeightsDigest

        digest = WeightsDigest()
        digest.add(list(self._learner.weights()))
        return digest.hexdigest()

    def store_weights(self, version: int) -> WeightsRef | None:
        """Write the current weights to the store under this version number; rank 0 returns their reference."""
        if self._rank != 0:
            self._join_gather()
            return None
        return self._writer.write(version, self._learner.weights())

    def begin_sharing(self, version: int) -> None:
        """Start to share the weights under this version number with engines on this rank's GPU; `share_bucket` returns the
        buckets."""
        from roll_core.weights.buckets import pack_on_device

        self._shared_buckets = pack_on_device(self._observed_weights(version), self._engine_dtype)

    def share_bucket(self) -> "DeviceBucket | None":
        """Return the next shared bucket, None after the last. It overwrites the one before, which engines must have
        loaded."""
        return next(self._shared_buckets, None)

    def finish_sharing(self) -> tuple["WeightsCheck", str]:
        """Return the check that engines compare their weights with, and the digest of the weights."""
        return self._check_recorder.check, self._digest.hexdigest()

    def offload(self) -> None:
        """Move the training state to host memory, so that the engine on this GPU can use the GPU's memory."""
        self._learner.offload()

    def reload(self) -> None:
        """Move the training state back to the GPU."""
        self._learner.reload()

    def open_group(self, engines: tuple[str, ...]) -> "Rendezvous":
        """Open a rendezvous of this rank and the engines, and return it; a previous group is closed. Rank 0 only. `engines`
        has a name for each worker of an engine."""
        import torch

        from roll_core.weights.broadcast import BroadcastSender

        self.close_group()
        device, members = torch.device(self._config.cluster.device.value), ("trainer rank 0", *engines)
        host, timeout_s = ray.util.get_node_ip_address(), self._config.weights.broadcast_seconds
        self._sender = BroadcastSender(host, members, timeout_s, device)
        return self._sender.rendezvous

    def wait_for_engines(self) -> None:
        """Wait until all engines have joined the broadcast group. Rank 0 only."""
        assert self._sender is not None
        self._sender.wait_for_members()

    def begin_broadcast(self, version: int) -> "BroadcastBucket | None":
        """Pack the first bucket of the weights under this version number; rank 0 returns its description, and `broadcast`
        sends it. The other ranks gather until the last bucket."""
        from roll_core.weights.buckets import pack_reusing_buffer

        if self._rank != 0:
            self._join_gather()
            return None
        self._unsent = pack_reusing_buffer(self._observed_weights(version), self._engine_dtype)
        return self._next_bucket()

    def broadcast(self) -> "BroadcastBucket | None":
        """Send the packed bucket to all engines, then pack the next one into the same memory and return its description,
        None after the last. Rank 0 only."""
        assert self._sender is not None
        self._sender.send(self._outgoing)
        return self._next_bucket()

    def close_group(self) -> tuple[str, ...]:
        """Close the broadcast group; return the engines that were late when they were last waited for. Rank 0 only."""
        deque(self._unsent, maxlen=0)  # if a broadcast broke off, other ranks are still gathering
        sender, self._sender = self._sender, None
        if sender is None:
            return ()
        sender.close()
        return sender.late_members

    def export(self, folder: Path) -> str:
        """Write the current policy as a Hugging Face folder; ranks write its shards in turn. Rank 0 returns the digest of
        all weights."""
        from roll_core.models.export import write_folder
        from roll_core.models.tensor_files import WriterRank
        from roll_core.weights.digests import WeightsDigest

        digest, weights = WeightsDigest(), self._learner.weights()
        if self._rank == 0:
            weights = digest.observe(weights)
        write_folder(self._config.model, weights, folder, writer=WriterRank(self._rank, self._num_ranks))
        return digest.hexdigest()

    def snapshot_state(self) -> None:
        """Copy the training state for a checkpoint; training can continue once this returns."""
        self._snapshot = self._learner.snapshot()

    @ray.method(concurrency_group=BACKGROUND)
    def store_snapshot(self, iteration: int) -> list[CheckpointFile]:
        """Write the snapshot to disk, then upload it to the store, while training continues; return the files of this
        rank."""
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None, "nothing was copied"
        folder = self._scratch / f"checkpoint-{iteration}"
        return upload_files(self._store, folder, snapshot(folder))

    def _observed_weights(self, version: int) -> "Iterator[tuple[str, Tensor]]":
        """Iterate over the weights while recording their check and digest, which are complete after the last tensor."""
        from roll_core.weights.checks import CheckRecorder
        from roll_core.weights.digests import WeightsDigest

        self._check_recorder, self._digest = CheckRecorder(version), WeightsDigest()
        return self._check_recorder.observe(self._digest.observe(self._learner.weights()))

    def _next_bucket(self) -> "BroadcastBucket | None":
        """Pack the next bucket for `broadcast`; return its description, None after the last."""
        from roll_core.weights.buckets import BroadcastBucket

        packed = next(self._unsent, None)
        if packed is None:
            return None
        entries, self._outgoing = packed
        return BroadcastBucket(entries, len(self._outgoing))

    def _join_gather(self) -> None:
        """Take part in gathering the weights for another rank."""
        for _ in self._learner.weights():
            pass

    def _idempotent(self, request_id: str, act: Callable[[], Result]) -> Result:
        """Call `act` once per request id; a repeated id gets the first result."""
        if request_id not in self._results:
            self._results[request_id] = act()
            for oldest in list(self._results)[:-RESULTS_KEPT]:
                del self._results[oldest]
        return self._results[request_id]

    def _prepared_batch(self, collected: Collected, trajectories: list[Trajectory] | None) -> "PreparedBatch":
        """Return the prepared batch; prepare it now if this rank does not have it."""
        if collected.request.request_id not in self._prepared:
            self.prepare(collected, trajectories)
        return self._prepared[collected.request.request_id]

    def _warm_start(self) -> Metrics:
        """Imitate demonstrations for the optimizer steps that `warm_start` configures."""
        from roll_core.batching.samples import demonstration_sample
        from roll_core.data.problem_source import build_source
        from roll_core.rollout.posing import render_demonstration
        from roll_core.rollout.renderer import build_renderer

        config, plan = self._config, self._config.warm_start
        assert plan is not None
        source, renderer = build_source(config.problems, config.seed), build_renderer(config.model)

        def demonstrations(step: int) -> list[Sample]:
            shown = [source.demonstration(step * plan.batch_size + i) for i in range(plan.batch_size)]
            rendered = [r for d in shown if (r := render_demonstration(d, renderer)) is not None]
            if not rendered:
                raise RollError(f"warm_start: none of the {len(shown)} demonstrations of step {step} can be rendered")
            return [demonstration_sample(prompt_ids, completion_ids) for prompt_ids, completion_ids in rendered]

        return {"warm_start/loss": self._learner.imitate(demonstrations, plan.optimizer, plan.steps)}

    def _memory_metrics(self) -> Metrics:
        """Peak GPU memory in GB since the last call; empty without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return {}
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return {"update/peak_memory_gb": peak / 1e9}

    def _load_teachers(self) -> None:
        """Build the frozen teachers, and load those that are checkpoints of runs."""
        from roll_core.training.learner import teacher_name

        self._learner.build_teachers()
        if isinstance(self._config.algorithm, Distillation):
            for number, teacher in enumerate(self._config.algorithm.teachers):
                if teacher.kind == "run":
                    assert teacher.iteration is not None, "teachers are pinned when a run is opened"
                    checkpoint = find_checkpoint(self._store, teacher.run_id, teacher.iteration)
                    self.fetch(checkpoint)
                    self._learner.load_frozen(teacher_name(number), self._restore_folder(checkpoint))
                    shutil.rmtree(self._restore_folder(checkpoint))

    def _check_metadata(self, file: CheckpointFile, folder: Path) -> None:
        """Raise ArtifactDamaged, before all ranks load together, if metadata of a checkpoint is not what torch writes."""
        from roll_core.training.checkpoint_reader import read_metadata

        try:
            read_metadata(folder / file.name)
        except ArtifactDamaged as error:
            raise ArtifactDamaged(f"store: {object_name(file.artifact)} in {self._store.uri}: {error}") from None

    def _restore_folder(self, checkpoint: CheckpointRef) -> Path:
        return self._scratch / f"restore-{checkpoint.iteration}-rank-{self._rank}"


def find_checkpoint(store: ObjectStore, run_id: str, iteration: int) -> CheckpointRef:
    """Return a run's checkpoint of an iteration; raise RollError if there is none."""
    for checkpoint in checkpoints_of(store, read_chain(store, run_id)):
        if checkpoint.iteration == iteration:
            return checkpoint
    raise RollError(f"run {run_id} in {store.uri} has no checkpoint of iteration {iteration} to learn from")
