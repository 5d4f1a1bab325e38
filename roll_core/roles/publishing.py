"""Publishing of numbered weights: from trainer ranks to engines, by the transport that `weights.transport` and the placement
call for.

The fleet owns one publisher. It holds Ray handles and object references, never a tensor.
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
"""Replaces dead workers, loads these weights into the new engines, and returns the bytes each new engine took."""


class Publisher:
    """Publisher of weights versions to all engines.

    An engine that missed a version, and every replacement of a dead engine, gets it from the store if that is the transport,
    else through Ray's object store.
    """

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        store: ObjectStore,
        ranks: dict[str, ActorHandle],
        worker_pool: WorkerPool,
        replace: Replace,
        background: Executor,
    ):
        self._config = config
        self._run_id = run_id
        self._store = store
        self._ranks = ranks
        self._worker_pool = worker_pool
        self._replace = replace
        self._background = background
        """Runs clean-up that no stage waits for."""
        self._stored: WeightsRef | None = None
        """Version that engines last read from the store; None with other transports."""
        self._group_engines: list[str] = []
        """Engines in the broadcast group with trainer rank 0; empty if there is no group."""

    def invalidate_group(self) -> None:
        """Form a new broadcast group at the next publish, because engines were added or replaced."""
        self._group_engines = []

    def publish(self, version: int) -> tuple[dict[str, int], str]:
        """Send the trainer's weights to all engines under this version number; return the bytes each engine took, and the
        weights digest."""
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
        """Publish through Ray's object store."""
        weights = self.put_in_object_store(version)
        return self._adopt(weights), weights.digest

    def _adopt(self, weights: RayWeights | WeightsRef) -> dict[str, int]:
        """Load weights into all engines and replace the dead ones. The weights are complete, in host memory or in the store,
        before engines stop for them."""
        num_bytes = self._worker_pool.adopt(weights)
        return num_bytes | self._replace(self._worker_pool.dead(known_alive=num_bytes), weights)

    def _publish_on_devices(self, version: int) -> tuple[dict[str, int], str]:
        """Publish through the memory of the GPU that a trainer rank and an engine share (CUDA IPC)."""
        training = self._config.training
        can_share_in_place = len(self._ranks) == 1 and training.backend is BackendKind.TORCH and training.lora is None
        share = self._share_in_place if can_share_in_place else self._share_by_buckets
        num_bytes, digest = share(version)
        if dead := self._worker_pool.dead(known_alive=num_bytes):
            num_bytes |= self._replace(dead, self.put_in_object_store(version))
        return num_bytes, digest

    def _share_in_place(self, version: int) -> tuple[dict[str, int], str]:
        """Have engines read the only rank's weights in place, without a copy at the trainer, while the rank computes their
        digest. Calls overlap where they can: the copy itself takes no longer than a round trip."""
        ((name, rank),) = self._ranks.items()
        deadline_s = self._config.deadlines.publish
        sharing, digesting = {name: rank.share_in_place.remote(version)}, {name: rank.digest.remote()}
        begun = self._worker_pool.begin_update()
        bucket, check = wait_for(sharing, "publish", deadline_s)[name]
        num_bytes = self._worker_pool.load_all(begun, bucket, version, check)
        return num_bytes, wait_for(digesting, "publish", deadline_s)[name]

    def _share_by_buckets(self, version: int) -> tuple[dict[str, int], str]:
        """Gather the ranks' shards on each GPU into one buffer, bucket by bucket; the engine there loads each bucket."""
        deadline_s = self._config.deadlines.publish
        num_bytes = self._worker_pool.begin_update()
        wait_for({name: rank.begin_sharing.remote(version) for name, rank in self._ranks.items()}, "publish", deadline_s)
        while True:
            sharing = {name: rank.share_bucket.remote() for name, rank in self._ranks.items()}
            buckets = wait_for(sharing, "publish", deadline_s)
            if _from_rank_0(buckets) is None:
                break
            num_bytes = self._worker_pool.load(num_bytes, list(buckets.values()))
        finishing = {name: rank.finish_sharing.remote() for name, rank in self._ranks.items()}
        check, digest = _from_rank_0(wait_for(finishing, "publish", deadline_s))
        alive = self._worker_pool.finish_update(num_bytes, version, check)
        return {name: size for name, size in num_bytes.items() if name in alive}, digest

    def _publish_by_broadcast(self, version: int) -> tuple[dict[str, int], str]:
        """Broadcast to all engines at once. If the broadcast breaks, kill the late engines, publish this version through
        Ray's object store, and form a new group for the next version."""
        try:
            num_bytes, digest = self._broadcast(version)
        except (BroadcastBroken, RoleDied) as error:
            late = self._close_group()
            log.warning(
                "weights version %d is sent by another transport: %s; late: %s", version, error, ", ".join(late) or "none"
            )
            self._worker_pool.kill(late)
            return self._publish_by_ray(version)
        if dead := self._worker_pool.dead(known_alive=num_bytes):
            num_bytes |= self._replace(dead, self.current_weights(version))
        return num_bytes, digest

    def _broadcast(self, version: int) -> tuple[dict[str, int], str]:
        """Broadcast bucket by bucket. The first failure ends it, since other members may be blocked by the failed one."""
        deadline_s = self._config.deadlines.publish
        num_bytes = self._worker_pool.begin_update()
        self._ensure_group(list(num_bytes))
        beginning = {name: rank.begin_broadcast.remote(version) for name, rank in self._ranks.items()}
        rank_0, gathering = self._ranks[RANK_0], {name: ref for name, ref in beginning.items() if name != RANK_0}
        bucket = self._wait_for_rank_0(beginning[RANK_0])
        while bucket is not None:
            received = wait_for(
                {RANK_0: rank_0.broadcast.remote()} | self._worker_pool.receive(bucket, list(num_bytes)),
                "publish",
                deadline_s,
            )
            bucket = received.pop(RANK_0)
            num_bytes = {name: num_bytes[name] + size for name, size in received.items()}
        wait_for(gathering, "publish", deadline_s)
        check, digest = self._wait_for_rank_0(rank_0.finish_sharing.remote())
        alive = self._worker_pool.finish_update(num_bytes, version, check)
        return {name: size for name, size in num_bytes.items() if name in alive}, digest

    def _ensure_group(self, engines: list[str]) -> None:
        """Form a broadcast group of trainer rank 0 and these engines, unless it exists."""
        if engines == self._group_engines:
            return
        rank_0, deadline_s = self._ranks[RANK_0], self._config.deadlines.publish
        self._group_engines = []
        rendezvous = self._wait_for_rank_0(rank_0.open_group.remote(self._worker_pool.broadcast_members(engines)))
        wait_for(
            {RANK_0: rank_0.wait_for_engines.remote()} | self._worker_pool.join(rendezvous, engines), "publish", deadline_s
        )
        self._group_engines = engines

    def _close_group(self) -> tuple[str, ...]:
        """Close the broadcast group; return the engines that were late when rank 0 last waited for them."""
        self._group_engines = []
        return self._wait_for_rank_0(self._ranks[RANK_0].close_group.remote())

    def put_in_object_store(self, version: int) -> RayWeights:
        """Put the trainer's current weights into Ray's object store under this version number."""
        calls = {name: rank.put_in_object_store.remote(version) for name, rank in self._ranks.items()}
        return _from_rank_0(wait_for(calls, "publish", self._config.deadlines.publish))

    def _store_weights(self, version: int) -> WeightsRef:
        """Write the trainer's current weights to the store under this version number."""
        calls = {name: rank.store_weights.remote(version) for name, rank in self._ranks.items()}
        stored: WeightsRef = _from_rank_0(wait_for(calls, "publish", self._config.deadlines.publish))
        if stored.base is None:  # a full version: no engine needs those before it
            self._background.submit(self._retire_weights)
        return stored

    def current_weights(self, version: int) -> RayWeights | WeightsRef:
        """Return the weights of this version for engines that missed it: a reference to the store if the version is there,
        else the trainer's weights in Ray's object store."""
        if self._stored is not None and self._stored.version == version:
            return self._stored
        return self.put_in_object_store(version)

    def _retire_weights(self) -> None:
        """Delete stored versions that no engine needs. A failure is logged and does not stop the run: leftovers only take
        space, and the next full version tries again."""
        try:
            gone = retire_weights(self._store, self._run_id, self._config.store.grace_minutes * 60)
        except RollError as error:
            log.warning("weights of %s could not be retired: %s", self._run_id, error)
            return
        log.info("retired weights of %s: %s", self._run_id, gone)

    def _wait_for_rank_0(self, reply: ray.ObjectRef) -> Any:
        return wait_for({RANK_0: reply}, "publish", self._config.deadlines.publish)[RANK_0]


def _from_rank_0(replies: dict[str, Any]) -> Any:
    return replies[RANK_0]
