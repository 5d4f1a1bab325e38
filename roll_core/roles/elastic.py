"""Engines on nodes that may go at any time, and come back (`legs.elastic`). Part of a leg's workforce.

They start, and take over weights, while nobody waits for them; once they have those that all engines have, they belong to
the workforce. Whoever dies is dropped: where its node lives another one is started there, and no node is waited for.
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

STARTS = 3
"""How often, on average, each place on a node gets an engine; then something is wrong with the node."""

log = logging.getLogger(__name__)

Make = Callable[[str], ActorHandle]
"""An engine on a node, by Ray's id of it."""
WeightsGetter = Callable[[int], RayWeights | WeightsRef]
"""The weights of a version, as somebody takes them over who has none."""


@dataclass
class _StartingEngine:
    """An engine on its way into the workforce."""

    node: str
    actor: ActorHandle
    doing: ray.ObjectRef
    version: int | None = None
    """Of the weights it is taking over; None while it starts."""


class ElasticEngines:
    def __init__(self, make: Make, devices_each: int, first_number: int):
        self._make = make
        self._devices_each = devices_each
        self._first_number = first_number
        self._recruits: dict[str, _StartingEngine] = {}
        self._node_of: dict[str, str] = {}
        """Engines that belong to the workforce."""
        self._starts: Counter[str] = Counter()

    def look(self, version: int, held: WeightsGetter) -> dict[str, ActorHandle]:
        """Engines that have come to belong to the workforce, by name: they have these weights."""
        self._start_on_new_nodes()
        weights: RayWeights | WeightsRef | None = None
        enlisted = {}
        for name, recruit in list(self._recruits.items()):
            if not ray.wait([recruit.doing], timeout=0)[0] or self._has_failed(name, recruit):
                continue
            if recruit.version == version:
                enlisted[name] = recruit.actor
                self._node_of[name] = self._recruits.pop(name).node
            else:
                weights = weights or held(version)
                recruit.version, recruit.doing = version, recruit.actor.adopt.remote(weights)
        return enlisted

    def drop(self, names: Collection[str]) -> list[str]:
        """Those of these that were here: nobody expects them back."""
        ours = [name for name in names if self._node_of.pop(name, None) is not None]
        if ours:
            log.warning("%s: gone with a node, or on one, that may go", ", ".join(ours))
        return ours

    def _start_on_new_nodes(self) -> None:
        engaged = Counter([*self._node_of.values(), *(recruit.node for recruit in self._recruits.values())])
        for node in vacancies(elastic_nodes(), engaged, self._starts, self._devices_each):
            taken = self._node_of.keys() | self._recruits.keys()
            name = next(name for name in map("engine {}".format, count(self._first_number)) if name not in taken)
            actor = self._make(node)
            self._recruits[name] = _StartingEngine(node, actor, actor.start.remote())
            self._starts[node] += 1

    def _has_failed(self, name: str, recruit: _StartingEngine) -> bool:
        try:
            ray.get(recruit.doing)
        except ray.exceptions.RayError as error:  # whatever is wrong there: the run does without it
            log.warning("%s could not be added: %s", name, one_line(error))
            ray.kill(self._recruits.pop(name).actor)
            return True
        return False


def vacancies(devices_of: Mapping[str, int], engaged: Counter[str], starts: Counter[str], devices_each: int) -> list[str]:
    """Nodes that have room for an engine, once for each that they have room for."""
    found = []
    for node, devices in devices_of.items():
        places = devices // devices_each
        found += [node] * min(places - engaged[node], STARTS * places - starts[node])
    return found
