"""All roles of a leg behind one object: each stage of an iteration is one method, one request, one receipt.

The tasks call it; it holds Ray handles and object references, never a batch or a tensor.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from roll_core.config.run import RunConfig
from roll_core.errors import RoleDied, RollError
from roll_core.host import replacing
from roll_core.roles.canary import check_nodes
from roll_core.roles.placement import reserve_devices
from roll_core.roles.publishing import RANK_0, Publisher
from roll_core.roles.ray_cluster import connect_ray, node_names, raylet_pid
from roll_core.roles.ray_weights import RayWeights
from roll_core.roles.scheduler_role import SchedulerRole
from roll_core.roles.trainer_rank import BESIDE, TrainerRank
from roll_core.roles.waiting import wait_for, wait_for_survivors
from roll_core.roles.worker_pool import OFF_DEVICE, WorkerPool
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import record_checkpoint, upload_files
from roll_core.store.records.exports import record_export
from roll_core.store.upkeep.retention import retire
from roll_core.types.manifest import Collected, CollectRequest, Evaluated, Manifest, Metrics, Prepared, Published, Updated
from roll_core.types.refs import ArtifactKind, ArtifactRef, CheckpointRef, ExportRef, RunRef, WeightsRef

SCHEDULER = "rollout scheduler"
MAX_SUCCESSIONS = 3
"""How often in one stage engines and reward workers are replaced after the last of them died; then the leg ends."""
RECRUIT_S = 2.0
"""How often it is looked for nodes with `legs.elastic`."""

log = logging.getLogger(__name__)


class Fleet:
    """Use as a context manager: roles start on entry and are gone, with their Ray cluster, on exit."""

    scheduler_role: type[SchedulerRole] = SchedulerRole
    """A benchmark compares with another one."""

    def __init__(self, run: RunRef, config: RunConfig, leg_dir: Path, ray_address: str | None = None):
        self._run = run
        self._config = config
        self._leg_dir = leg_dir
        self._ray_address = ray_address
        """Of a Ray cluster that is there already, with its head on this machine; None starts one here."""
        self._trajectories: dict[str, list[ray.ObjectRef]] = {}
        self._lent = False
        """Whether the trainer has the devices that it shares with engines."""
        self._store = ObjectStore(run.store_uri, config.store.retry_seconds)
        self._beside = ThreadPoolExecutor(1, "store-checkpoint")
        self._storing: Future[CheckpointRef] | None = None
        self.checkpoint_s = 0.0
        """How long it took to store the last checkpoint, or to load one, which is as long, while none was stored."""

    def __enter__(self) -> "Fleet":
        deadline_s = self._config.deadlines.start
        connect_ray(self._config.cluster, self._ray_address, deadline_s)
        check_nodes(self._config.cluster, self._config.nodes, self._leg_dir)
        devices = reserve_devices(self._config)
        config, placement = self._config, self._config.placement
        self._workforce = WorkerPool(config, self._run.store_uri, devices)
        self._ranks = {
            f"trainer rank {rank}": ray.remote(concurrency_groups={BESIDE: 1})(TrainerRank)
            .options(**devices.options([device]))
            .remote(config, self._run, self._leg_dir, rank, len(placement.trainer))
            for rank, device in enumerate(placement.trainer)
        }
        self._scheduler = (
            ray.remote(self.scheduler_role)
            .options(**OFF_DEVICE)
            .remote(config, self._run, self._leg_dir.parent, self._workforce.engines(), self._workforce.graders())
        )
        self._publisher = Publisher(
            config, self._run.run_id, self._store, self._ranks, self._workforce, self._replace, self._beside
        )
        self._start_roles(deadline_s)
        return self

    @property
    def has_critic(self) -> bool:
        return self._config.algorithm.has_critic

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the machines this leg runs on now."""
        return node_names()

    def __exit__(self, *_: object) -> None:
        ray.shutdown()  # ends what is still being stored, too
        self._beside.shutdown()

    def warm_start(self) -> Metrics:
        self._lend_devices_to_trainer()
        calls = {name: rank.warm_start.remote("warm_start") for name, rank in self._ranks.items()}
        return self._from_rank_0(wait_for(calls, "update", self._config.deadlines.update))

    def restore(self, checkpoint: CheckpointRef, first_checkpoint: CheckpointRef) -> None:
        self._lend_devices_to_trainer()
        began_at = time.monotonic()
        calls = {name: rank.restore.remote(checkpoint, first_checkpoint) for name, rank in self._ranks.items()}
        wait_for(calls, "checkpoint", self._config.deadlines.checkpoint)
        self.checkpoint_s = time.monotonic() - began_at

    def collect(self, request: CollectRequest) -> Collected:
        self._have_engines_serve(request.weights_version)
        version, deadline_s = request.weights_version, self._config.deadlines.collect
        answer = self._with_successors(lambda: self._scheduler.collect.remote(request), version, "collect", deadline_s)
        collected, self._trajectories[request.request_id] = answer
        return collected

    def prepare(self, collected: Collected) -> Prepared:
        self._lend_devices_to_trainer()
        calls = {name: rank.prepare.remote(*self._batch(collected)) for name, rank in self._ranks.items()}
        return self._from_rank_0(wait_for(calls, "prepare", self._config.deadlines.prepare))

    def update_critic(self, collected: Collected) -> Metrics:
        self._lend_devices_to_trainer()
        calls = {name: rank.update_critic.remote(*self._batch(collected)) for name, rank in self._ranks.items()}
        return self._from_rank_0(wait_for(calls, "update", self._config.deadlines.update))

    def update(self, collected: Collected) -> Updated:
        self._lend_devices_to_trainer()
        calls = {name: rank.update.remote(*self._batch(collected)) for name, rank in self._ranks.items()}
        updated = self._from_rank_0(wait_for(calls, "update", self._config.deadlines.update))
        self._trajectories.pop(collected.request.request_id, None)
        return updated

    def publish(self, version: int) -> Published:
        num_bytes, digest = self._publisher.publish(version)
        if missing := [engine.name for engine in self._workforce.engines() if engine.name not in num_bytes]:
            raise RoleDied(f"{', '.join(missing)} could not take over weights version {version}: who held them died")
        self._lend_devices_to_engines()  # before anything is drawn, or all of it goes to those that were never paused
        self._from_scheduler(self._scheduler.adopted.remote(version), "publish", self._config.deadlines.publish)
        return Published(weights_version=version, weights_digest=digest, num_bytes=sum(num_bytes.values()))

    def weights_digest(self) -> str:
        """Of the policy the trainer holds now."""
        return self._publisher.bucket(version=0).digest

    def evaluate(self, weights_version: int) -> Evaluated:
        self._have_engines_serve(weights_version)
        ask, deadline_s = partial(self._scheduler.evaluate.remote, weights_version), self._config.deadlines.evaluate
        return self._with_successors(ask, weights_version, "evaluate", deadline_s)

    def checkpoint(self, iteration: int, published: Published) -> None:
        """Copy what learning goes on from, and begin to store the copy. One at a time: a store that is slower than the
        run slows the run down."""
        self.store_checkpoint()
        began_at = time.monotonic()
        copying = {name: rank.copy_state.remote() for name, rank in self._ranks.items()}
        wait_for(copying, "checkpoint", self._config.deadlines.checkpoint)
        storing = {name: rank.store_copy.remote(iteration) for name, rank in self._ranks.items()}
        self._storing = self._beside.submit(self._record_when_stored, storing, iteration, published, began_at)

    def store_checkpoint(self) -> CheckpointRef | None:
        """Wait until the checkpoint that is being stored is one, if there is such; raise what went wrong with it."""
        storing, self._storing = self._storing, None
        return storing.result() if storing else None

    def raise_if_not_stored(self) -> None:
        """Storing a checkpoint failed: to be known now, not at the next one."""
        if self._storing is not None and self._storing.done():
            self.store_checkpoint()

    def retire_checkpoints(self) -> None:
        """Let go what the run's policy does not keep. What goes wrong with that is no reason to stop learning: whatever is
        left takes room and no harm, and the next checkpoint tries again."""
        config = self._config
        if config.checkpoint.keep_last is None:
            return
        try:
            gone = retire(self._store, self._run.run_id, config.checkpoint, config.store.grace_minutes * 60)
        except RollError as error:
            log.warning("checkpoints of %s could not be retired: %s", self._run.run_id, error)
            return
        log.info("retired checkpoints of %s: %s", self._run.run_id, [checkpoint.iteration for checkpoint in gone])

    def export(self, folder: Path) -> str:
        """Write the policy the trainer holds as a Hugging Face folder; the digest of the weights in it."""
        self._lend_devices_to_trainer()
        calls = {name: rank.export.remote(folder) for name, rank in self._ranks.items()}
        return self._from_rank_0(wait_for(calls, "checkpoint", self._config.deadlines.checkpoint))

    def store_export(self, manifest: Manifest) -> ExportRef | None:
        """Store the policy of the newest manifest as a Hugging Face folder; nothing, if a recovery led to another policy."""
        folder, committed = self._leg_dir / f"export-{manifest.iteration}", manifest.weights_digest
        digest = self.export(folder)
        if committed and digest != committed:
            log.warning("%s is not exported: weights %s were recovered, %s committed", manifest.run_id, digest, committed)
            return None
        files = upload_files(self._store, folder, sorted(folder.iterdir()), ArtifactKind.EXPORT_FILE)
        export = ExportRef(iteration=manifest.iteration, weights_digest=committed, files=tuple(files))
        record_export(self._store, manifest.run_id, export)
        shutil.rmtree(folder)
        return export

    def wait_until_stored(self, artifacts: list[ArtifactRef]) -> None:
        """Everything a manifest is going to name is in the store when this returns."""
        answer = self._scheduler.wait_until_stored.remote(artifacts)
        self._from_scheduler(answer, "store", self._config.deadlines.store)

    def committed(self, next_problem: int) -> None:
        """What was kept of earlier problems is not needed any more. Nobody waits until it is gone."""
        self._scheduler.committed.remote(next_problem)

    def _record_when_stored(
        self, storing: dict[str, ray.ObjectRef], iteration: int, published: Published, began_at: float
    ) -> CheckpointRef:
        answers = wait_for(storing, "checkpoint", self._config.deadlines.checkpoint)
        checkpoint = CheckpointRef(
            iteration=iteration,
            weights_version=published.weights_version,
            weights_digest=published.weights_digest,
            files=tuple(file for files in answers.values() for file in files),
        )
        record_checkpoint(self._store, self._run.run_id, checkpoint)
        self.checkpoint_s = time.monotonic() - began_at
        shutil.rmtree(self._leg_dir / f"checkpoint-{iteration}")
        self.retire_checkpoints()
        return checkpoint

    def _start_roles(self, deadline_s: float) -> None:
        calls = self._workforce.start()
        calls[SCHEDULER] = self._scheduler.start.remote()
        if self._config.training.offload:
            wait_for(calls, "start", deadline_s)  # engines look how much memory there is
            self._workforce.sleep()
            self._lent = True
        first_rank = next(iter(self._ranks.values()))
        meeting_point = wait_for({RANK_0: first_rank.meeting_point.remote()}, "start", deadline_s)[RANK_0]
        calls |= {name: rank.start.remote(meeting_point) for name, rank in self._ranks.items()}
        wait_for(calls, "start", deadline_s)
        self._write_process_list()

    def _write_process_list(self) -> None:
        """Who is who among the living processes of this leg: for a person with a debugger, and for tests that kill."""
        actors: dict[str, ActorHandle] = self._workforce.actors | self._ranks | {SCHEDULER: self._scheduler}
        pids = {name: actor.__ray_call__.remote(lambda _: os.getpid()) for name, actor in actors.items()}
        processes = wait_for_survivors(pids, "start", self._config.deadlines.start)
        processes["leg"] = os.getpid()
        if self._ray_address is None:
            processes["ray node"] = raylet_pid()
        with replacing(self._leg_dir / "processes.json") as file:
            file.write(json.dumps(processes, indent=1).encode())

    def _batch(self, collected: Collected) -> tuple[Collected, ray.ObjectRef | None]:
        refs = self._trajectories.get(collected.request.request_id)
        return collected, refs[0] if refs else None

    def _from_rank_0(self, answers: dict[str, Any]) -> Any:
        return answers[RANK_0]

    def _lend_devices_to_trainer(self) -> None:
        """Engines on the trainer's devices give up what they are at, and sleep; the others go on."""
        if self._lent or not self._workforce.on_trainer_devices:
            return
        pausing = self._scheduler.pause.remote(self._workforce.on_trainer_devices)
        self._from_scheduler(pausing, "publish", self._workforce.yielding_deadline_s)
        self._workforce.sleep()
        if self._config.training.offload:
            self._of_ranks(lambda rank: rank.reload.remote())
        self._lent = True

    def _lend_devices_to_engines(self) -> None:
        """They have weights again; what else they need is theirs once the trainer is off the devices."""
        if not self._lent:
            return
        if self._config.training.offload:
            self._of_ranks(lambda rank: rank.offload.remote())
        self._workforce.wake()
        resuming = self._scheduler.resume.remote(self._workforce.on_trainer_devices)
        self._from_scheduler(resuming, "publish", self._config.deadlines.publish)
        self._lent = False

    def _have_engines_serve(self, version: int) -> None:
        """Engines that slept while the trainer worked, and did not move the policy, get the weights they had."""
        if self._lent:
            self.publish(version)

    def _of_ranks(self, ask: Callable[[ActorHandle], ray.ObjectRef]) -> None:
        wait_for({name: ask(rank) for name, rank in self._ranks.items()}, "publish", self._config.deadlines.publish)

    def _with_successors(self, ask: Callable[[], ray.ObjectRef], version: int, stage: str, deadline_s: float) -> Any:
        """An answer of the scheduler, which does not fail because all who could work for it have died.

        It keeps the deadline itself, since it knows who is late; the wait here only covers its own death.
        """
        for _ in range(MAX_SUCCESSIONS):
            try:
                answer = ask()
                self._recruit_until(answer, version, deadline_s)
                return self._from_scheduler(answer, stage, 1.1 * deadline_s)
            except RoleDied:
                dead = self._workforce.dead()
                if not dead:
                    raise
                self._replace(dead, self._publisher.held(version))
        return self._from_scheduler(ask(), stage, 1.1 * deadline_s)

    def _recruit_until(self, answer: ray.ObjectRef, version: int, deadline_s: float) -> None:
        """Add engines on nodes that come while a stage lasts, so that it ends sooner."""
        if self._config.legs.elastic is None:
            return
        ends_at, is_there = time.monotonic() + deadline_s, False
        while not is_there and time.monotonic() < ends_at:
            if added := self._workforce.recruit(version, self._publisher.held):
                self._introduce(added)
            is_there = bool(ray.wait([answer], timeout=RECRUIT_S)[0])

    def _replace(self, dead: list[str], weights: RayWeights | WeightsRef) -> dict[str, int]:
        dead = self._workforce.drop_elastic(dead)
        if not dead:
            return {}
        num_bytes = self._workforce.replace(dead, weights)
        self._introduce(dead)
        return num_bytes

    def _introduce(self, names: list[str]) -> None:
        """New ones to those who work with them."""
        self._publisher.forget_group()
        welcome = self._scheduler.welcome.remote(self._workforce.engines(names), self._workforce.graders(names))
        self._from_scheduler(welcome, "start", self._config.deadlines.start)
        self._write_process_list()

    def _from_scheduler(self, answer: ray.ObjectRef, stage: str, deadline_s: float) -> Any:
        return wait_for({SCHEDULER: answer}, stage, deadline_s)[SCHEDULER]
