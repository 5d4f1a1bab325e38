"""Engines on elastic nodes (`legs.elastic`), which may be preempted at any time and may come back. Part of a leg's worker
pool.

Elastic engines start and load weights in the background. An engine joins the pool once it has the current weights version. A
dead engine is dropped. Another one is started if its node is alive; no stage waits for a lost node.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count

import ray
from ray.actor import ActorHandle

from roll_core.errors import one_line
from roll_core.roles.ray_cluster import elastic_nodes
from roll_core.roles.ray_weights import RayWeights
from roll_core.types.refs import WeightsRef

MAX_STARTS_PER_SLOT = 3
"""Engine starts per slot of a node, on average. A node that has used them up is faulty and gets no more engines."""

log = logging.getLogger(__name__)

EngineFactory = Callable[[str], ActorHandle]
"""Creates an engine actor on a node, given Ray's node id."""
WeightsGetter = Callable[[int], RayWeights | WeightsRef]
"""Returns the weights of a version, in a form that an engine without any weights can load."""


@dataclass
class _StartingEngine:
    """Engine that is starting or loading weights, and is not in the worker pool yet."""

    node: str
    actor: ActorHandle
    pending_call: ray.ObjectRef
    """The call in progress: `start`, then `adopt`."""
    version: int | None = None
    """Weights version that is being loaded; None while the engine starts."""


class ElasticEngines:
    """Engines on elastic nodes: starts them, loads their weights, hands them to the worker pool, forgets dead ones."""

    def __init__(self, make: EngineFactory, devices_per_engine: int, first_number: int):
        self._make = make
        self._devices_per_engine = devices_per_engine
        self._first_number = first_number
        self._starting: dict[str, _StartingEngine] = {}
        """Engines that are not in the worker pool yet, by name."""
        self._node_of: dict[str, str] = {}
        """Ray's node id of each engine that is in the worker pool, by engine name."""
        self._starts: Counter[str] = Counter()
        """Engines started so far, by Ray's node id."""

    def poll(self, version: int, get_weights: WeightsGetter) -> dict[str, ActorHandle]:
        """Start engines on free slots and return the engines that became ready, by name: they have the weights of this
        version. Never waits for an engine."""
        self._fill_free_slots()
        weights: RayWeights | WeightsRef | None = None
        ready = {}
        for name, starting in list(self._starting.items()):
            if not ray.wait([starting.pending_call], timeout=0)[0] or self._has_failed(name, starting):
                continue
            if starting.version == version:
                ready[name] = starting.actor
                self._node_of[name] = self._starting.pop(name).node
            else:
                weights = weights or get_weights(version)
                starting.version, starting.pending_call = version, starting.actor.adopt.remote(weights)
        return ready

    def drop(self, names: Collection[str]) -> list[str]:
        """Forget those of the named engines that are elastic; return their names."""
        ours = [name for name in names if self._node_of.pop(name, None) is not None]
        if ours:
            log.warning("%s: gone with a node, or on one, that may go", ", ".join(ours))
        return ours

    def _fill_free_slots(self) -> None:
        """Start an engine on every free slot of the elastic nodes."""
        occupied = Counter([*self._node_of.values(), *(starting.node for starting in self._starting.values())])
        for node in free_engine_slots(elastic_nodes(), occupied, self._starts, self._devices_per_engine):
            taken = self._node_of.keys() | self._starting.keys()
            name = next(name for name in map("engine {}".format, count(self._first_number)) if name not in taken)
            actor = self._make(node)
            self._starting[name] = _StartingEngine(node, actor, actor.start.remote())
            self._starts[node] += 1

    def _has_failed(self, name: str, starting: _StartingEngine) -> bool:
        """Return True if the finished call failed; the engine is then killed and forgotten."""
        try:
            ray.get(starting.pending_call)
        except ray.exceptions.RayError as error:  # any failure: the run continues without this engine
            log.warning("%s could not be added: %s", name, one_line(error))
            ray.kill(self._starting.pop(name).actor)
            return True
        return False


def free_engine_slots(
    devices_of: Mapping[str, int], occupied: Counter[str], starts: Counter[str], devices_per_engine: int
) -> list[str]:
    """Return the nodes with free slots for engines: each node id once per slot. `devices_of` counts devices, `occupied`
    counts engines and `starts` counts engine starts so far, all by node id. Slots of a node that has no starts left
    (MAX_STARTS_PER_SLOT) are not free."""
    found = []
    for node, devices in devices_of.items():
        slots = devices // devices_per_engine
        found += [node] * min(slots - occupied[node], MAX_STARTS_PER_SLOT * slots - starts[node])
    return found
