"""Engines and reward workers of a leg. They keep nothing that cannot be given to another, so whoever dies gets a successor.

The fleet holds one of these; the scheduler gets clients for what is in it.
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

ASYNC_CALLS = 1000
"""Calls an asynchronous role may have under way; far above what a stage issues."""
OFF_DEVICE: dict[str, Any] = {"num_cpus": 0, "max_concurrency": ASYNC_CALLS, "resources": {LEG_RESOURCE: 0.001}}

log = logging.getLogger(__name__)


class WorkerPool:
    def __init__(self, config: RunConfig, store_uri: str, devices: ReservedDevices):
        self._deadlines = config.deadlines
        finishes = config.rollout.in_flight is InFlightPolicy.FINISH
        self.yielding_deadline_s = config.deadlines.publish + (config.deadlines.collect if finishes else 0.0)
        """How long engines may take to make way for new weights or the trainer: what they are at may have to be finished."""
        self._makes: dict[str, Callable[[], ActorHandle]] = {}
        self._rank_of: dict[str, int] = {}
        """Engines on a trainer's device: the rank that is there, too."""
        self._devices_per_engine = len(config.engine_devices[0])
        for number, its_devices in enumerate(config.engine_devices):
            options = devices.options(its_devices) | {"max_concurrency": ASYNC_CALLS}
            self._makes[f"engine {number}"] = partial(ray.remote(EngineRole).options(**options).remote, config, store_uri)
            for device in config.placement.shared.intersection(its_devices):
                self._rank_of[f"engine {number}"] = config.placement.trainer.index(device)
        self._on_trainer_devices = list(self._rank_of)
        self._engine_names = list(self._makes)
        for number in range(config.placement.reward_workers):
            options = OFF_DEVICE | {"scheduling_strategy": "SPREAD"}
            self._makes[f"reward worker {number}"] = partial(ray.remote(RewardRole).options(**options).remote, config)
        self._elastic = ElasticEngines(
            lambda node: ray.remote(EngineRole).options(**self._options_on(node, devices.kind)).remote(config, store_uri),
            self._devices_per_engine,
            first_number=len(self._engine_names),
        )
        self.actors = {name: make() for name, make in self._makes.items()}

    def engines(self, names: Sequence[str] | None = None) -> list[RemoteEngine]:
        """Clients for some of them, or for all."""
        names = list(self.actors) if names is None else names
        return [RemoteEngine(name, self.actors[name]) for name in names if name in self._engine_names]

    def graders(self, names: Sequence[str] | None = None) -> list[RemoteGrader]:
        names = list(self.actors) if names is None else names
        return [RemoteGrader(name, self.actors[name]) for name in names if name not in self._engine_names]

    @property
    def on_trainer_devices(self) -> list[str]:
        """Engines that must make room while the trainer works."""
        return self._on_trainer_devices

    def start(self) -> dict[str, ray.ObjectRef]:
        return {name: actor.start.remote() for name, actor in self.actors.items()}

    def sleep(self) -> None:
        self._of_engines_that_share(lambda engine: engine.sleep.remote())

    def wake(self) -> None:
        self._of_engines_that_share(lambda engine: engine.wake.remote())

    def adopt(self, weights: RayWeights | WeightsRef) -> dict[str, int]:
        """Engines take over weights; bytes that each took. The dead are not among them."""
        adopting = {name: self.actors[name].adopt.remote(weights) for name in self._engine_names}
        return wait_for_survivors(adopting, "publish", self.yielding_deadline_s)

    def begin_update(self) -> dict[str, int]:
        """Engines make way for weights that they are going to be given one bucket after another; bytes that each took."""
        beginning = {name: self.actors[name].begin_update.remote() for name in self._engine_names}
        return dict.fromkeys(wait_for_survivors(beginning, "publish", self.yielding_deadline_s), 0)

    def workers(self, engines: Sequence[str]) -> tuple[str, ...]:
        """Who of these engines takes part in a broadcast: a worker a device, by the engine's name."""
        return tuple(engine for engine in engines for _ in range(self._devices_per_engine))

    def joining(self, meeting: "Rendezvous", names: Sequence[str]) -> dict[str, ray.ObjectRef]:
        """Engines on their way into a group."""
        return {name: self.actors[name].join.remote(meeting, meeting.members.index(name)) for name in names}

    def receiving(self, bucket: "BroadcastBucket", names: Sequence[str]) -> dict[str, ray.ObjectRef]:
        """Engines that take part in the broadcast of a bucket."""
        return {name: self.actors[name].load.remote(bucket) for name in names}

    def end(self, names: Collection[str]) -> None:
        """Who is of no use any more is gone; successors are others' business."""
        for name in names:
            ray.kill(self.actors[name])

    def load(self, num_bytes: dict[str, int], bucket_of_rank: "list[DeviceBucket]") -> dict[str, int]:
        """Those that live take the bucket of the rank on their device."""
        loading = {name: self.actors[name].load.remote(bucket_of_rank[self._rank_of[name]]) for name in num_bytes}
        loaded = wait_for_survivors(loading, "publish", self._deadlines.publish)
        return {name: num_bytes[name] + size for name, size in loaded.items()}

    def load_only(
        self, names: Collection[str], bucket: "DeviceBucket", version: int, check: "WeightsCheck"
    ) -> dict[str, int]:
        """Those of these that live take the bucket of the only rank, which has all weights, and serve by them."""
        loading = {name: self.actors[name].load_only.remote(bucket, version, check) for name in names}
        return wait_for_survivors(loading, "publish", self._deadlines.publish)

    def finish_update(self, names: Collection[str], version: int, check: "WeightsCheck") -> list[str]:
        """Who of these serves by the new weights."""
        finishing = {name: self.actors[name].finish_update.remote(version, check) for name in names}
        return list(wait_for_survivors(finishing, "publish", self._deadlines.publish))

    def dead(self, known_alive: Collection[str] = ()) -> list[str]:
        """Who does not live any more, engines and reward workers."""
        doubtful = {name: actor for name, actor in self.actors.items() if name not in known_alive}
        asked = {name: actor.__ray_call__.remote(lambda _: True) for name, actor in doubtful.items()}
        alive = wait_for_survivors(asked, "start", self._deadlines.start)
        return [name for name in doubtful if name not in alive]

    def recruit(self, version: int, held: WeightsGetter) -> list[str]:
        """Engines that were added just now, on nodes that may go at any time; they have the weights of this version."""
        added = self._elastic.look(version, held)
        self.actors |= added
        self._engine_names += added
        return list(added)

    def drop_elastic(self, dead: Sequence[str]) -> list[str]:
        """Forget engines that nobody expects back; the others, who need successors."""
        dropped = self._elastic.drop(dead)
        for name in dropped:
            del self.actors[name]
            self._engine_names.remove(name)
        return [name for name in dead if name not in dropped]

    def replace(self, dead: Sequence[str], weights: RayWeights | WeightsRef) -> dict[str, int]:
        """Successors of these, engines with the policy's weights; bytes that each took over."""
        successors = {name: self._makes[name]() for name in dead}
        wait_for({name: actor.start.remote() for name, actor in successors.items()}, "start", self._deadlines.start)
        adopting = {n: actor.adopt.remote(weights) for n, actor in successors.items() if n in self._engine_names}
        num_bytes = wait_for(adopting, "publish", self._deadlines.publish)
        self.actors |= successors
        log.warning("%s: replaced", ", ".join(dead))
        return num_bytes

    def _options_on(self, node: str, kind: DeviceKind) -> dict[str, Any]:
        """Ray options that put an engine on a node that may go at any time."""
        devices = self._devices_per_engine
        resources = {"num_cpus": devices} if kind is DeviceKind.CPU else {"num_cpus": 0, "num_gpus": devices}
        return resources | {
            "resources": {ELASTIC_RESOURCE: devices},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "max_concurrency": ASYNC_CALLS,
        }

    def _of_engines_that_share(self, ask: Callable[[ActorHandle], ray.ObjectRef]) -> None:
        """Who died is noticed, and replaced, when weights are published."""
        asked = {name: ask(self.actors[name]) for name in self._on_trainer_devices}
        wait_for_survivors(asked, "publish", self._deadlines.publish)
