"""Roles of a leg behind one object: each stage of an iteration is one method, one request and one receipt.

Tasks call it. It holds Ray handles and object references, never a batch or a tensor.
"""

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from roll_core.config.run import ForkedFrom, RunConfig
from roll_core.config.training.training import BackendKind
from roll_core.errors import LegInterrupted, RoleDied, RollError, one_line
from roll_core.host import atomic_replace
from roll_core.roles.canary import check_nodes
from roll_core.roles.placement import reserve_devices
from roll_core.roles.publishing import RANK_0, Publisher
from roll_core.roles.ray_cluster import connect_ray, node_names, raylet_pid
from roll_core.roles.ray_weights import RayWeights
from roll_core.roles.rehearsal_rank import RehearsalRank
from roll_core.roles.scheduler_role import SchedulerRole
from roll_core.roles.trainer_rank import BACKGROUND, TrainerRank
from roll_core.roles.waiting import wait_for, wait_for_survivors
from roll_core.roles.worker_pool import OFF_DEVICE, WorkerPool
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import put_missing_files, record_checkpoint, touch_files, upload_files
from roll_core.store.records.exports import record_export
from roll_core.store.upkeep.retention import retire
from roll_core.types.manifest import Collected, CollectRequest, Evaluated, Manifest, Metrics, Prepared, Published, Updated
from roll_core.types.refs import ArtifactKind, ArtifactRef, CheckpointFile, CheckpointRef, ExportRef, RunRef, WeightsRef

SCHEDULER = "rollout scheduler"
MAX_REPLACEMENTS = 3
"""Rounds of replacing dead engines and reward workers in one stage. A round happens when a stage fails because no engine or
no reward worker is left. After the last round the leg ends."""
MAX_REWARD_REPLACEMENTS = 30
"""Rounds of replacing reward workers alone in one stage. An answer that kills its reward worker costs three of them before
it counts as failed: with one reward worker, about ten such answers in a stage end the leg."""
STAGE_POLL_S = 1.0
"""Seconds between two polls, while engines generate, for a signal and for engines on elastic nodes (`legs.elastic`)."""
STOP_ROLLOUTS_S = 30.0
"""Seconds that a leg that ends waits for its last finished trajectories to reach the journal. Engines have ten to stop."""

log = logging.getLogger(__name__)


class Fleet:
    """Trainer ranks, engines, reward workers and the rollout scheduler of a leg.

    Use as a context manager: roles start on entry and are gone, with their Ray cluster, on exit.
    """

    scheduler_role: type[SchedulerRole] = SchedulerRole
    """Class of the rollout scheduler's actor; a benchmark substitutes its own."""

    def __init__(
        self,
        run: RunRef,
        config: RunConfig,
        leg_dir: Path,
        ray_address: str | None = None,
        is_told_to_stop: Callable[[], bool] = lambda: False,
    ):
        """Create the roles of a leg. Once `is_told_to_stop()`, the stages `collect`, `prepare` and `evaluate` are left: they
        raise LegInterrupted."""
        self._run = run
        self._is_told_to_stop = is_told_to_stop
        self._config = config
        self._leg_dir = leg_dir
        self._ray_address = ray_address
        """Address of a running Ray cluster whose head is on this machine; None starts a cluster here."""
        self._trajectories: dict[str, list[ray.ObjectRef]] = {}
        """References to collected trajectories by request id, until `update` has used them."""
        self._trainer_has_devices = False
        """True while the trainer has the devices that it shares with engines."""
        self._store = ObjectStore(run.store_uri, config.store.retry_seconds)
        self._background = ThreadPoolExecutor(1, "store-checkpoint")
        """Thread that stores checkpoints and deletes old weights while training continues."""
        self._storing: Future[CheckpointRef] | None = None
        """Checkpoint that is being stored, if any."""
        self.checkpoint_s = 0.0
        """Seconds that it took to store the last checkpoint. Until one is stored: seconds that it took to load one, which
        takes as long."""

    def __enter__(self) -> "Fleet":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        """Connect to Ray, check its nodes and start all roles."""
        deadline_s = self._config.deadlines.start
        connect_ray(self._config.cluster, self._ray_address, deadline_s)
        check_nodes(self._config.cluster, self._config.nodes, self._leg_dir)
        devices = reserve_devices(self._config)
        config, placement = self._config, self._config.placement
        self._worker_pool = WorkerPool(config, self._run.store_uri, devices)
        self._ranks = {
            f"trainer rank {rank}": ray.remote(concurrency_groups={BACKGROUND: 1})(_rank_role(config))
            .options(**devices.options([device]))
            .remote(config, self._run, self._leg_dir, rank, len(placement.trainer))
            for rank, device in enumerate(placement.trainer)
        }
        self._scheduler = (
            ray.remote(self.scheduler_role)
            .options(**OFF_DEVICE)
            .remote(config, self._run, self._leg_dir.parent, self._worker_pool.engines(), self._worker_pool.graders())
        )
        self._publisher = Publisher(
            config, self._run.run_id, self._store, self._ranks, self._worker_pool, self._replace, self._background
        )
        self._start_roles(deadline_s)

    @property
    def has_critic(self) -> bool:
        return self._config.algorithm.has_critic

    @property
    def needs_reference(self) -> bool:
        """True if the algorithm compares the policy with that of the run's first checkpoint."""
        return self._config.algorithm.needs_reference

    @property
    def origin(self) -> ForkedFrom | None:
        """Run and iteration that the run was forked from; None if it is not a fork."""
        return self._config.forked_from

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the machines in this leg's Ray cluster now."""
        return node_names()

    def __exit__(self, *_: object) -> None:
        ray.shutdown()  # also ends uploads in progress
        self._background.shutdown()

    def warm_start(self) -> Metrics:
        """Run the supervised steps on demonstrations; return their metrics."""
        self._give_devices_to_trainer()
        calls = {name: rank.warm_start.remote("warm_start") for name, rank in self._ranks.items()}
        return self._from_rank_0(wait_for(calls, "update", self._config.deadlines.update))

    def restore(self, checkpoint: CheckpointRef) -> None:
        """Load a checkpoint into the trainer. Raise ArtifactDamaged if it is damaged."""
        began_at = time.monotonic()
        self._fetch(checkpoint)
        calls = {name: rank.restore.remote(checkpoint) for name, rank in self._ranks.items()}
        wait_for(calls, "checkpoint", self._config.deadlines.checkpoint)
        self.checkpoint_s = time.monotonic() - began_at

    def load_reference(self, checkpoint: CheckpointRef) -> None:
        """Load the policy of a checkpoint as the frozen reference. Raise ArtifactDamaged if it is damaged."""
        self._fetch(checkpoint)
        calls = {name: rank.load_reference.remote(checkpoint) for name, rank in self._ranks.items()}
        wait_for(calls, "checkpoint", self._config.deadlines.checkpoint)

    def _fetch(self, checkpoint: CheckpointRef) -> None:
        """Download a checkpoint to all ranks, verified. Ranks that load wait for each other: without this stage before it,
        they would wait for a rank that had found damage."""
        self._give_devices_to_trainer()
        calls = {name: rank.fetch.remote(checkpoint) for name, rank in self._ranks.items()}
        wait_for(calls, "checkpoint", self._config.deadlines.checkpoint)

    def collect(self, request: CollectRequest) -> Collected:
        """Generate and grade the trajectories of one batch."""
        self._leave_if_told_to_stop("collect")
        self._reload_engines(request.weights_version)
        version, deadline_s = request.weights_version, self._config.deadlines.collect
        reply = self._retry_with_replacements(
            lambda: self._scheduler.collect.remote(request), version, "collect", deadline_s
        )
        collected, self._trajectories[request.request_id] = reply
        return collected

    def prepare(self, collected: Collected) -> Prepared:
        """Compute the signals, advantages and micro-batches of a collected batch on the trainer ranks."""
        self._leave_if_told_to_stop("prepare")
        self._give_devices_to_trainer()
        calls = {name: rank.prepare.remote(*self._batch(collected)) for name, rank in self._ranks.items()}
        prepared = self._from_rank_0(wait_for(calls, "prepare", self._config.deadlines.prepare))
        self._leave_if_told_to_stop("prepare")  # before the update, which would have to be finished
        return prepared

    def update_critic(self, collected: Collected) -> Metrics:
        """Run the critic's optimizer steps on a batch; return their metrics."""
        self._give_devices_to_trainer()
        calls = {name: rank.update_critic.remote(*self._batch(collected)) for name, rank in self._ranks.items()}
        return self._from_rank_0(wait_for(calls, "update", self._config.deadlines.update))

    def update(self, collected: Collected) -> Updated:
        """Run the policy's optimizer steps on a batch."""
        self._give_devices_to_trainer()
        calls = {name: rank.update.remote(*self._batch(collected)) for name, rank in self._ranks.items()}
        updated = self._from_rank_0(wait_for(calls, "update", self._config.deadlines.update))
        self._trajectories.pop(collected.request.request_id, None)
        return updated

    def publish(self, version: int) -> Published:
        """Send the trainer's weights to all engines under this version number, and let the engines generate with it."""
        num_bytes, digest = self._publisher.publish(version)
        if missing := [engine.name for engine in self._worker_pool.engines() if engine.name not in num_bytes]:
            raise RoleDied(f"{', '.join(missing)} could not take over weights version {version}: who held them died")
        self._give_devices_to_engines()  # before attempts are drawn, else all go to engines that never paused
        self._wait_for_scheduler(self._scheduler.on_adopted.remote(version), "publish", self._config.deadlines.publish)
        return Published(weights_version=version, weights_digest=digest, num_bytes=sum(num_bytes.values()))

    def weights_digest(self) -> str:
        """Digest of the policy weights that the trainer holds now."""
        return self._publisher.put_in_object_store(version=0).digest

    def evaluate(self, weights_version: int) -> Evaluated:
        """Measure greedy accuracy on held-out problems with this weights version."""
        self._leave_if_told_to_stop("evaluate")
        self._reload_engines(weights_version)
        call, deadline_s = partial(self._scheduler.evaluate.remote, weights_version), self._config.deadlines.evaluate
        return self._retry_with_replacements(call, weights_version, "evaluate", deadline_s)

    def stop_rollouts(self) -> None:
        """Stop generating, and wait until everything that was finished is in the journal, STOP_ROLLOUTS_S at most."""
        try:
            self._wait_for_scheduler(self._scheduler.stop.remote(), "collect", STOP_ROLLOUTS_S)
        except RollError as error:  # a lost journal costs time and nothing else
            log.warning("what was generated since the last commit may have to be generated again: %s", error)

    def checkpoint(self, iteration: int, published: Published) -> None:
        """Snapshot the training state, and store the snapshot in the background. Waits for the checkpoint before it, so a
        store slower than the run slows the run down."""
        self.wait_for_checkpoint()
        began_at = time.monotonic()
        snapshots = {name: rank.snapshot_state.remote() for name, rank in self._ranks.items()}
        wait_for(snapshots, "checkpoint", self._config.deadlines.checkpoint)
        storing = {name: rank.store_snapshot.remote(iteration) for name, rank in self._ranks.items()}
        self._storing = self._background.submit(self._record_when_stored, storing, iteration, published, began_at)

    def wait_for_checkpoint(self) -> CheckpointRef | None:
        """Wait until the checkpoint in progress is stored; return None if there is none. Raise if storing it failed."""
        storing, self._storing = self._storing, None
        return storing.result() if storing else None

    def raise_if_storing_failed(self) -> None:
        """Raise if storing the last checkpoint has failed, so that the leg ends now and not at the next checkpoint."""
        if self._storing is not None and self._storing.done():
            self.wait_for_checkpoint()

    def retire_checkpoints(self) -> None:
        """Delete the checkpoints that `checkpoint.keep_last` does not keep. A failure is logged and does not stop the run:
        leftovers only take space, and the next checkpoint tries again."""
        config = self._config
        if config.checkpoint.keep_last is None:
            return
        try:
            gone = retire(self._store, self._run.run_id, config.checkpoint, config.store.grace_minutes * 60)
        except Exception as error:  # noqa: BLE001  whatever it is, training goes on
            log.warning("checkpoints of %s could not be retired: %s", self._run.run_id, one_line(error))
            return
        log.info("retired checkpoints of %s: %s", self._run.run_id, [checkpoint.iteration for checkpoint in gone])

    def export(self, folder: Path) -> str:
        """Write the trainer's policy as a Hugging Face folder; return the digest of its weights."""
        self._give_devices_to_trainer()
        calls = {name: rank.export.remote(folder) for name, rank in self._ranks.items()}
        return self._from_rank_0(wait_for(calls, "checkpoint", self._config.deadlines.checkpoint))

    def store_export(self, manifest: Manifest) -> ExportRef | None:
        """Store the policy of the newest manifest as a Hugging Face export. Return None, and store nothing, if a recovery
        led to weights other than the committed ones."""
        folder, committed = self._leg_dir / f"export-{manifest.iteration}", manifest.weights_digest
        began_at, digest = time.monotonic(), self.export(folder)
        if committed and digest != committed:
            log.warning("%s is not exported: weights %s were recovered, %s committed", manifest.run_id, digest, committed)
            return None
        files = upload_files(self._store, folder, sorted(folder.iterdir()), ArtifactKind.EXPORT_FILE)
        export = ExportRef(iteration=manifest.iteration, weights_digest=committed, files=tuple(files))
        with self._files_kept(folder, export.files, began_at):
            record_export(self._store, manifest.run_id, export)
        shutil.rmtree(folder)
        return export

    def wait_until_stored(self, artifacts: list[ArtifactRef]) -> None:
        """Wait until these artifacts are in the store, so that a manifest may name them."""
        reply = self._scheduler.wait_until_stored.remote(artifacts)
        self._wait_for_scheduler(reply, "store", self._config.deadlines.store)

    def on_committed(self, next_problem: int) -> None:
        """Notify the scheduler that all problems before `next_problem` are committed, so that it drops their journal. Does
        not wait."""
        self._scheduler.on_committed.remote(next_problem)

    def _record_when_stored(
        self, storing: dict[str, ray.ObjectRef], iteration: int, published: Published, began_at: float
    ) -> CheckpointRef:
        """Wait until all ranks have stored their files, record the checkpoint and retire old ones. Runs in the background
        thread."""
        replies = wait_for(storing, "checkpoint", self._config.deadlines.checkpoint)
        checkpoint = CheckpointRef(
            iteration=iteration,
            weights_version=published.weights_version,
            weights_digest=published.weights_digest,
            files=tuple(file for files in replies.values() for file in files),
        )
        folder = self._leg_dir / f"checkpoint-{iteration}"
        with self._files_kept(folder, checkpoint.files, began_at):
            record_checkpoint(self._store, self._run.run_id, checkpoint)
        self.checkpoint_s = time.monotonic() - began_at
        shutil.rmtree(folder)
        self.retire_checkpoints()
        return checkpoint

    @contextlib.contextmanager
    def _files_kept(self, folder: Path, files: Sequence[CheckpointFile], began_at: float) -> Iterator[None]:
        """Keep stored files from garbage collection while the block creates the record that names them.

        As with rollouts (`store/write_behind.py`): missing files are put again before and after, and files that may be old,
        because storing them took a quarter of the grace period, are made young. `began_at` is the monotonic time before
        the first was stored.
        """
        put_missing_files(self._store, folder, files)
        if time.monotonic() - began_at > self._config.store.grace_minutes * 60 / 4:
            touch_files(self._store, files)
        yield
        put_missing_files(self._store, folder, files)

    def _start_roles(self, deadline_s: float) -> None:
        """Start all roles. With `training.offload`, engines start and sleep before the trainer takes device memory."""
        calls = self._worker_pool.start()
        calls[SCHEDULER] = self._scheduler.start.remote()
        if self._config.training.offload:
            wait_for(calls, "start", deadline_s)  # engines measure the free memory when they start
            self._worker_pool.sleep()
            self._trainer_has_devices = True
        first_rank = next(iter(self._ranks.values()))
        rendezvous_address = wait_for({RANK_0: first_rank.rendezvous_address.remote()}, "start", deadline_s)[RANK_0]
        calls |= {name: rank.start.remote(rendezvous_address) for name, rank in self._ranks.items()}
        wait_for(calls, "start", deadline_s)
        self._write_process_list()

    def _write_process_list(self) -> None:
        """Write the process id of every live role to `processes.json` in the leg's folder, for a debugger and for tests that
        kill roles."""
        actors: dict[str, ActorHandle] = self._worker_pool.actors | self._ranks | {SCHEDULER: self._scheduler}
        pids = {name: actor.__ray_call__.remote(lambda _: os.getpid()) for name, actor in actors.items()}
        processes = wait_for_survivors(pids, "start", self._config.deadlines.start)
        processes["leg"] = os.getpid()
        if self._ray_address is None:
            processes["ray node"] = raylet_pid()
        try:
            with atomic_replace(self._leg_dir / "processes.json") as file:
                file.write(json.dumps(processes, indent=1).encode())
        except OSError as error:  # a full disk must not end a run
            log.warning("the leg has no processes.json: %s", error)

    def _batch(self, collected: Collected) -> tuple[Collected, ray.ObjectRef | None]:
        """Return the arguments of a trainer call: the receipt, and a reference to the trajectories. The reference is None if
        an earlier leg collected them; ranks then read the store."""
        refs = self._trajectories.get(collected.request.request_id)
        return collected, refs[0] if refs else None

    def _from_rank_0(self, replies: dict[str, Any]) -> Any:
        return replies[RANK_0]

    def _give_devices_to_trainer(self) -> None:
        """Pause the engines on trainer devices and put them to sleep, then reload an offloaded trainer. Other engines
        continue."""
        if self._trainer_has_devices or not self._worker_pool.on_trainer_devices:
            return
        pausing = self._scheduler.pause.remote(self._worker_pool.on_trainer_devices)
        self._wait_for_scheduler(pausing, "publish", self._worker_pool.pause_deadline_s)
        self._worker_pool.sleep()
        if self._config.training.offload:
            self._on_all_ranks(lambda rank: rank.reload.remote())
        self._trainer_has_devices = True

    def _give_devices_to_engines(self) -> None:
        """Offload the trainer, if `training.offload` is set, then wake the engines on trainer devices and resume their
        attempts. The engines already have their weights."""
        if not self._trainer_has_devices:
            return
        if self._config.training.offload:
            self._on_all_ranks(lambda rank: rank.offload.remote())
        self._worker_pool.wake()
        resuming = self._scheduler.resume.remote(self._worker_pool.on_trainer_devices)
        self._wait_for_scheduler(resuming, "publish", self._config.deadlines.publish)
        self._trainer_has_devices = False

    def _reload_engines(self, version: int) -> None:
        """Publish the weights again if engines sleep: they gave up their weights for a trainer that did not update the
        policy."""
        if self._trainer_has_devices:
            self.publish(version)

    def _on_all_ranks(self, call: Callable[[ActorHandle], ray.ObjectRef]) -> None:
        """Call all trainer ranks and wait."""
        wait_for({name: call(rank) for name, rank in self._ranks.items()}, "publish", self._config.deadlines.publish)

    def _retry_with_replacements(
        self, call: Callable[[], ray.ObjectRef], version: int, stage: str, deadline_s: float
    ) -> Any:
        """Return the scheduler's reply to `call`. If it fails because its engines or reward workers died, replace them and
        call again.

        The scheduler enforces the deadline, since it knows which role is late. The wait here is 10 % longer and only covers
        the scheduler's own death.
        """
        num_rounds = 0
        while True:
            try:
                return self._attended_reply(call(), version, stage, deadline_s)
            except RoleDied:
                dead = self._worker_pool.dead()
                limit = MAX_REPLACEMENTS if self._worker_pool.engines(dead) else MAX_REWARD_REPLACEMENTS
                if not dead or num_rounds == limit:
                    raise
                num_rounds += 1
                self._replace(dead, self._publisher.current_weights(version))

    def _attended_reply(self, reply: ray.ObjectRef, version: int, stage: str, deadline_s: float) -> Any:
        """Wait for the scheduler's reply to a stage that generates. Until then add engines on elastic nodes, so that the
        stage ends sooner, and stop the stage once the leg is told to stop, which makes the reply a LegInterrupted."""
        ends_at, is_done = time.monotonic() + deadline_s, False
        while not is_done and not self._is_told_to_stop() and time.monotonic() < ends_at:
            if self._config.legs.elastic is not None:
                self._add_elastic_engines(version)
            is_done = bool(ray.wait([reply], timeout=STAGE_POLL_S)[0])
        if self._is_told_to_stop():
            self._scheduler.stop.remote()
        return self._wait_for_scheduler(reply, stage, 1.1 * deadline_s)

    def _add_elastic_engines(self, version: int) -> None:
        if added := self._worker_pool.add_elastic(version, self._publisher.current_weights):
            self._register_workers(added)

    def _leave_if_told_to_stop(self, stage: str) -> None:
        if self._is_told_to_stop():
            raise LegInterrupted(f"{stage} was left, because the leg was told to stop")

    def _replace(self, dead: list[str], weights: RayWeights | WeightsRef) -> dict[str, int]:
        """Replace dead workers, with these weights for engines; return the bytes each new engine took. Elastic engines are
        dropped and not replaced."""
        dead = self._worker_pool.drop_elastic(dead)
        if not dead:
            return {}
        num_bytes = self._worker_pool.replace(dead, weights)
        self._register_workers(dead)
        return num_bytes

    def _register_workers(self, names: list[str]) -> None:
        """Give the scheduler clients of new workers, and have the next broadcast form a new group."""
        self._publisher.invalidate_group()
        adding = self._scheduler.add_workers.remote(self._worker_pool.engines(names), self._worker_pool.graders(names))
        self._wait_for_scheduler(adding, "start", self._config.deadlines.start)
        self._write_process_list()

    def _wait_for_scheduler(self, reply: ray.ObjectRef, stage: str, deadline_s: float) -> Any:
        return wait_for({SCHEDULER: reply}, stage, deadline_s)[SCHEDULER]


def _rank_role(config: RunConfig) -> type[TrainerRank]:
    match config.training.backend:
        case BackendKind.REHEARSAL:
            return RehearsalRank
        case BackendKind.TORCH | BackendKind.MEGATRON:
            return TrainerRank
