"""Pool of a leg's engines and reward workers. Both are stateless, so a dead one is replaced by a new actor of the same name.

The fleet owns one pool. The rollout scheduler gets clients of the pool's actors.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_core.config.operations.placement import ELASTIC_RESOURCE, LEG_RESOURCE, DeviceKind
from roll_core.config.rollout import InFlightPolicy
from roll_core.config.run import RunConfig
from roll_core.roles.elastic import ElasticEngines, WeightsGetter
from roll_core.roles.engine_role import EngineRole
from roll_core.roles.placement import ReservedDevices
from roll_core.roles.ray_weights import RayWeights
from roll_core.roles.reward_role import RewardRole
from roll_core.roles.scheduler_role import RemoteEngine, RemoteGrader
from roll_core.roles.waiting import wait_for, wait_for_survivors
from roll_core.types.refs import WeightsRef

if TYPE_CHECKING:
    from roll_core.weights.broadcast import Rendezvous
    from roll_core.weights.buckets import BroadcastBucket, DeviceBucket
    from roll_core.weights.checks import WeightsCheck

MAX_CONCURRENT_CALLS = 1000
"""Calls that one asynchronous role may have in progress; far above what a stage issues."""
OFF_DEVICE: dict[str, Any] = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENT_CALLS, "resources": {LEG_RESOURCE: 0.001}}
"""Ray options of a role without a device: no CPU is reserved, and its node is not an elastic one."""
CALL_RETRIES = 3
"""Times that Ray repeats a call to a reward worker that it could not reach for a moment. Grading twice does no harm."""

log = logging.getLogger(__name__)


class WorkerPool:
    """Engines and reward workers as Ray actors, by name ("engine 0", "reward worker 1").

    Calls go to many actors at once and skip dead engines: a name that is missing from a result is a dead engine.
    """

    def __init__(self, config: RunConfig, store_uri: str, devices: ReservedDevices):
        self._deadlines = config.deadlines
        finishes = config.rollout.in_flight is InFlightPolicy.FINISH
        self.pause_deadline_s = config.deadlines.publish + (config.deadlines.collect if finishes else 0.0)
        """Seconds that engines may take to stop generating for new weights or for the trainer: `deadlines.publish`, plus
        `deadlines.collect` where `rollout.in_flight` lets running requests finish first."""
        self._factories: dict[str, Callable[[], ActorHandle]] = {}
        """Creates an actor or its replacement, by name."""
        self._colocated_rank: dict[str, int] = {}
        """Trainer rank on the same device, by engine name; only for engines on a trainer's device."""
        self._devices_per_engine = len(config.engine_devices[0])
        for number, its_devices in enumerate(config.engine_devices):
            options = devices.options(its_devices) | {"max_concurrency": MAX_CONCURRENT_CALLS}
            self._factories[f"engine {number}"] = partial(
                ray.remote(EngineRole).options(**options).remote, config, store_uri
            )
            for device in config.placement.shared.intersection(its_devices):
                self._colocated_rank[f"engine {number}"] = config.placement.trainer.index(device)
        self._on_trainer_devices = list(self._colocated_rank)
        self._engine_names = list(self._factories)
        for number in range(config.placement.reward_workers):
            options = OFF_DEVICE | {"scheduling_strategy": "SPREAD", "max_task_retries": CALL_RETRIES}
            self._factories[f"reward worker {number}"] = partial(ray.remote(RewardRole).options(**options).remote, config)
        self._elastic = ElasticEngines(
            lambda node: ray.remote(EngineRole).options(**self._options_on(node, devices.kind)).remote(config, store_uri),
            self._devices_per_engine,
            first_number=len(self._engine_names),
        )
        self.actors = {name: make() for name, make in self._factories.items()}

    def engines(self, names: Sequence[str] | None = None) -> list[RemoteEngine]:
        """Return clients of the named engines, or of all engines. Names of reward workers are skipped."""
        names = list(self.actors) if names is None else names
        return [RemoteEngine(name, self.actors[name]) for name in names if name in self._engine_names]

    def graders(self, names: Sequence[str] | None = None) -> list[RemoteGrader]:
        """Return clients of the named reward workers, or of all reward workers. Names of engines are skipped."""
        names = list(self.actors) if names is None else names
        return [RemoteGrader(name, self.actors[name]) for name in names if name not in self._engine_names]

    @property
    def on_trainer_devices(self) -> list[str]:
        """Names of the engines on trainer devices, which must sleep while the trainer works."""
        return self._on_trainer_devices

    def start(self) -> dict[str, ray.ObjectRef]:
        """Start all roles; return the pending calls by name."""
        return {name: actor.start.remote() for name, actor in self.actors.items()}

    def sleep(self) -> None:
        """Make engines on trainer devices release the device memory."""
        self._for_colocated_engines(lambda engine: engine.sleep.remote())

    def wake(self) -> None:
        """Make engines on trainer devices allocate the device memory again."""
        self._for_colocated_engines(lambda engine: engine.wake.remote())

    def adopt(self, weights: RayWeights | WeightsRef) -> dict[str, int]:
        """Load weights into all engines; return the bytes each one took, by name. Dead engines are left out."""
        adopting = {name: self.actors[name].adopt.remote(weights) for name in self._engine_names}
        return wait_for_survivors(adopting, "publish", self.pause_deadline_s)

    def begin_update(self) -> dict[str, int]:
        """Make all engines stop for an update that arrives bucket by bucket. Return the bytes received so far, 0, for each
        live engine by name."""
        beginning = {name: self.actors[name].begin_update.remote() for name in self._engine_names}
        return dict.fromkeys(wait_for_survivors(beginning, "publish", self.pause_deadline_s), 0)

    def broadcast_members(self, engines: Sequence[str]) -> tuple[str, ...]:
        """Return the broadcast group members of these engines: the engine's name once per device."""
        return tuple(engine for engine in engines for _ in range(self._devices_per_engine))

    def join(self, rendezvous: "Rendezvous", names: Sequence[str]) -> dict[str, ray.ObjectRef]:
        """Ask these engines to join a broadcast group; return the pending calls by name."""
        return {name: self.actors[name].join.remote(rendezvous, rendezvous.members.index(name)) for name in names}

    def receive(self, bucket: "BroadcastBucket", names: Sequence[str]) -> dict[str, ray.ObjectRef]:
        """Ask these engines to receive a bucket that is broadcast; return the pending calls by name."""
        return {name: self.actors[name].load.remote(bucket) for name in names}

    def kill(self, names: Collection[str]) -> None:
        """Kill these actors. Replacing them is up to the caller."""
        for name in names:
            ray.kill(self.actors[name])

    def load(self, num_bytes: dict[str, int], bucket_of_rank: "list[DeviceBucket]") -> dict[str, int]:
        """Load a bucket into each engine named in `num_bytes`: that of the trainer rank on its device. Return `num_bytes` of
        the survivors, increased by the bucket's bytes."""
        loading = {name: self.actors[name].load.remote(bucket_of_rank[self._colocated_rank[name]]) for name in num_bytes}
        loaded = wait_for_survivors(loading, "publish", self._deadlines.publish)
        return {name: num_bytes[name] + size for name, size in loaded.items()}

    def load_all(
        self, names: Collection[str], bucket: "DeviceBucket", version: int, check: "WeightsCheck"
    ) -> dict[str, int]:
        """Load a bucket that holds all weights into these engines and finish their update; return the bytes each survivor
        took. Used with a single trainer rank."""
        loading = {name: self.actors[name].load_all.remote(bucket, version, check) for name in names}
        return wait_for_survivors(loading, "publish", self._deadlines.publish)

    def finish_update(self, names: Collection[str], version: int, check: "WeightsCheck") -> list[str]:
        """Make these engines check their weights and serve with them; return the names of the survivors."""
        finishing = {name: self.actors[name].finish_update.remote(version, check) for name in names}
        return list(wait_for_survivors(finishing, "publish", self._deadlines.publish))

    def dead(self, known_alive: Collection[str] = ()) -> list[str]:
        """Return the names of dead engines and reward workers. Names in `known_alive` are not pinged."""
        doubtful = {name: actor for name, actor in self.actors.items() if name not in known_alive}
        asked = {name: actor.__ray_call__.remote(lambda _: True) for name, actor in doubtful.items()}
        alive = wait_for_survivors(asked, "start", self._deadlines.start)
        return [name for name in doubtful if name not in alive]

    def add_elastic(self, version: int, get_weights: WeightsGetter) -> list[str]:
        """Add the engines on elastic nodes that became ready with this weights version; return their names."""
        added = self._elastic.poll(version, get_weights)
        self.actors |= added
        self._engine_names += added
        return list(added)

    def drop_elastic(self, dead: Sequence[str]) -> list[str]:
        """Remove dead elastic engines from the pool; return the other dead workers, which need replacements."""
        dropped = self._elastic.drop(dead)
        for name in dropped:
            del self.actors[name]
            self._engine_names.remove(name)
        return [name for name in dead if name not in dropped]

    def replace(self, dead: Sequence[str], weights: RayWeights | WeightsRef) -> dict[str, int]:
        """Replace dead workers; new engines load `weights`. Return the bytes each new engine took, by name."""
        successors = {name: self._factories[name]() for name in dead}
        wait_for({name: actor.start.remote() for name, actor in successors.items()}, "start", self._deadlines.start)
        adopting = {n: actor.adopt.remote(weights) for n, actor in successors.items() if n in self._engine_names}
        num_bytes = wait_for(adopting, "publish", self._deadlines.publish)
        self.actors |= successors
        log.warning("%s: replaced", ", ".join(dead))
        return num_bytes

    def _options_on(self, node: str, kind: DeviceKind) -> dict[str, Any]:
        """Ray options that pin an engine to an elastic node."""
        devices = self._devices_per_engine
        resources = {"num_cpus": devices} if kind is DeviceKind.CPU else {"num_cpus": 0, "num_gpus": devices}
        return resources | {
            "resources": {ELASTIC_RESOURCE: devices},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "max_concurrency": MAX_CONCURRENT_CALLS,
        }

    def _for_colocated_engines(self, call: Callable[[ActorHandle], ray.ObjectRef]) -> None:
        """Call all engines on trainer devices and wait. A dead one is skipped; the next publish replaces it."""
        asked = {name: call(self.actors[name]) for name in self._on_trainer_devices}
        wait_for_survivors(asked, "publish", self._deadlines.publish)
