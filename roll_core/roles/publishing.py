"""The passage of numbered weights from trainer ranks to engines, by the transport that the placement calls for.

The fleet publishes by one of these. It holds Ray handles and references, never a tensor.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import ray
from ray.actor import ActorHandle

from roll_core.config.operations.weights import WeightsTransport
from roll_core.config.run import RunConfig
from roll_core.config.training.training import BackendKind
from roll_core.errors import BroadcastBroken, RoleDied, RollError
from roll_core.roles.ray_weights import RayWeights
from roll_core.roles.waiting import wait_for
from roll_core.roles.worker_pool import WorkerPool
from roll_core.store.object_store import ObjectStore
from roll_core.store.upkeep.retention import retire_weights
from roll_core.types.refs import WeightsRef

RANK_0 = "trainer rank 0"

log = logging.getLogger(__name__)

Replace = Callable[[list[str], RayWeights | WeightsRef], dict[str, int]]
"""Gives engines that died successors with these weights; bytes that each took."""


class Publisher:
    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        store: ObjectStore,
        ranks: dict[str, ActorHandle],
        worker_pool: WorkerPool,
        replace: Replace,
        beside: Executor,
    ):
        self._config = config
        self._run_id = run_id
        self._store = store
        self._ranks = ranks
        self._workforce = worker_pool
        self._replace = replace
        self._beside = beside
        """For what nobody waits for."""
        self._stored: WeightsRef | None = None
        """What engines read last, where they read from the store."""
        self._met: list[str] = []
        """Engines that are in a group with trainer rank 0, where they are broadcast to."""

    def forget_group(self) -> None:
        """Engines have been replaced: those who meet the next time are others."""
        self._met = []

    def publish(self, version: int) -> tuple[dict[str, int], str]:
        """Bytes that every engine took, and the digest of the weights."""
        match self._config.weights_transport:
            case WeightsTransport.SHARED_GPU:
                return self._publish_on_devices(version)
            case WeightsTransport.BROADCAST:
                return self._publish_by_broadcast(version)
            case WeightsTransport.STORE:
                self._stored = self._store_weights(version)
                return self._adopt(self._stored), self._stored.weights_digest
            case _:
                return self._publish_by_ray(version)

    def _publish_by_ray(self, version: int) -> tuple[dict[str, int], str]:
        weights = self.bucket(version)
        return self._adopt(weights), weights.digest

    def _adopt(self, weights: RayWeights | WeightsRef) -> dict[str, int]:
        """All of it waits in host memory or in the store before engines are asked to stop for it."""
        num_bytes = self._workforce.adopt(weights)
        return num_bytes | self._replace(self._workforce.dead(known_alive=num_bytes), weights)

    def _publish_on_devices(self, version: int) -> tuple[dict[str, int], str]:
        """Through the memory of the GPU that rank and engine are on."""
        training = self._config.training
        lie_as_they_are_read = len(self._ranks) == 1 and training.backend is BackendKind.TORCH and training.lora is None
        share = self._share_in_place if lie_as_they_are_read else self._share_by_buckets
        num_bytes, digest = share(version)
        if dead := self._workforce.dead(known_alive=num_bytes):
            num_bytes |= self._replace(dead, self.bucket(version))
        return num_bytes, digest

    def _share_in_place(self, version: int) -> tuple[dict[str, int], str]:
        """The engine reads the weights of the only rank where they lie, while that computes their digest. Whatever can be
        asked at the same time is: the copy itself takes no longer than a question."""
        ((name, rank),) = self._ranks.items()
        deadline_s = self._config.deadlines.publish
        sharing, digesting = {name: rank.share_in_place.remote(version)}, {name: rank.digest.remote()}
        begun = self._workforce.begin_update()
        bucket, check = wait_for(sharing, "publish", deadline_s)[name]
        num_bytes = self._workforce.load_only(begun, bucket, version, check)
        return num_bytes, wait_for(digesting, "publish", deadline_s)[name]

    def _share_by_buckets(self, version: int) -> tuple[dict[str, int], str]:
        """Ranks have parts: on each GPU they are gathered into one buffer after another."""
        deadline_s = self._config.deadlines.publish
        num_bytes = self._workforce.begin_update()
        wait_for({name: rank.begin_sharing.remote(version) for name, rank in self._ranks.items()}, "publish", deadline_s)
        while True:
            sharing = {name: rank.share_bucket.remote() for name, rank in self._ranks.items()}
            buckets = wait_for(sharing, "publish", deadline_s)
            if _from_rank_0(buckets) is None:
                break
            num_bytes = self._workforce.load(num_bytes, list(buckets.values()))
        finishing = {name: rank.finish_sharing.remote() for name, rank in self._ranks.items()}
        check, digest = _from_rank_0(wait_for(finishing, "publish", deadline_s))
        alive = self._workforce.finish_update(num_bytes, version, check)
        return {name: size for name, size in num_bytes.items() if name in alive}, digest

    def _publish_by_broadcast(self, version: int) -> tuple[dict[str, int], str]:
        """To all engines at once. If that breaks, whoever was late is ended, all take this version another way, and the next
        one is broadcast among those who are there then."""
        try:
            num_bytes, digest = self._broadcast(version)
        except (BroadcastBroken, RoleDied) as error:
            late = self._part_with_engines()
            log.warning("weights version %d goes another way: %s; late: %s", version, error, ", ".join(late) or "nobody")
            self._workforce.end(late)
            return self._publish_by_ray(version)
        if dead := self._workforce.dead(known_alive=num_bytes):
            num_bytes |= self._replace(dead, self.held(version))
        return num_bytes, digest

    def _broadcast(self, version: int) -> tuple[dict[str, int], str]:
        """Bucket by bucket; the first failure ends it, since the others may be waiting for whoever failed."""
        deadline_s = self._config.deadlines.publish
        num_bytes = self._workforce.begin_update()
        self._meet_engines(list(num_bytes))
        beginning = {name: rank.begin_broadcast.remote(version) for name, rank in self._ranks.items()}
        rank_0, helping = self._ranks[RANK_0], {name: ref for name, ref in beginning.items() if name != RANK_0}
        bucket = self._of_rank_0(beginning[RANK_0])
        while bucket is not None:
            taken = wait_for(
                {RANK_0: rank_0.broadcast.remote()} | self._workforce.receiving(bucket, list(num_bytes)),
                "publish",
                deadline_s,
            )
            bucket = taken.pop(RANK_0)
            num_bytes = {name: num_bytes[name] + size for name, size in taken.items()}
        wait_for(helping, "publish", deadline_s)
        check, digest = self._of_rank_0(rank_0.finish_sharing.remote())
        alive = self._workforce.finish_update(num_bytes, version, check)
        return {name: size for name, size in num_bytes.items() if name in alive}, digest

    def _meet_engines(self, engines: list[str]) -> None:
        """Form a group of trainer rank 0 and these, unless it is the one there is."""
        if engines == self._met:
            return
        rank_0, deadline_s = self._ranks[RANK_0], self._config.deadlines.publish
        self._met = []
        meeting = self._of_rank_0(rank_0.open_group.remote(self._workforce.workers(engines)))
        wait_for({RANK_0: rank_0.meet_engines.remote()} | self._workforce.joining(meeting, engines), "publish", deadline_s)
        self._met = engines

    def _part_with_engines(self) -> tuple[str, ...]:
        """End the group; engines that did not come when they were last waited for."""
        self._met = []
        return self._of_rank_0(self._ranks[RANK_0].leave_group.remote())

    def bucket(self, version: int) -> RayWeights:
        """The weights that the trainer has now, under this number, in Ray's object store."""
        calls = {name: rank.bucket_weights.remote(version) for name, rank in self._ranks.items()}
        return _from_rank_0(wait_for(calls, "publish", self._config.deadlines.publish))

    def _store_weights(self, version: int) -> WeightsRef:
        calls = {name: rank.store_weights.remote(version) for name, rank in self._ranks.items()}
        stored: WeightsRef = _from_rank_0(wait_for(calls, "publish", self._config.deadlines.publish))
        if stored.base is None:  # what came before it is not needed by any engine
            self._beside.submit(self._retire_weights)
        return stored

    def held(self, version: int) -> RayWeights | WeightsRef:
        """The weights of this version, for engines that missed them: from the store, or asked of the trainer again."""
        if self._stored is not None and self._stored.version == version:
            return self._stored
        return self.bucket(version)

    def _retire_weights(self) -> None:
        """As with checkpoints: what goes wrong with it costs room, and the next one tries again."""
        try:
            gone = retire_weights(self._store, self._run_id, self._config.store.grace_minutes * 60)
        except RollError as error:
            log.warning("weights of %s could not be retired: %s", self._run_id, error)
            return
        log.info("retired weights of %s: %s", self._run_id, gone)

    def _of_rank_0(self, answer: ray.ObjectRef) -> Any:
        return wait_for({RANK_0: answer}, "publish", self._config.deadlines.publish)[RANK_0]


def _from_rank_0(answers: dict[str, Any]) -> Any:
    return answers[RANK_0]
