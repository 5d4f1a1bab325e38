"""What proves that engines hold the trainer's weights: every name, and columns of some tensors, taken before they travel.

Which tensors and which columns depends on the version, so that over several updates all are looked at.
"""

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from roll_core.models.checkpoint_names import is_experts
from roll_core.seeds import derive_seed

TENSORS, COLUMNS = 8, 16
"""Looked at in each update: a mistake in names or layout touches many tensors and shows at once, and it costs nothing."""


@dataclass(frozen=True, eq=False)
class WeightsSample:
    """Some columns of a tensor, as the trainer has them.

    Example: WeightsSample("model.layers.0.mlp.up_proj.weight", columns=(3, 17), values=<192 x 2>)
    """

    name: str
    columns: tuple[int, ...]
    """Of its last dimension."""
    values: Tensor


@dataclass(frozen=True)
class WeightsCheck:
    """What an engine's weights are compared with once it has taken them over."""

    names: tuple[str, ...]
    """Of all tensors."""
    samples: tuple[WeightsSample, ...]


class Watch:
    """Sees tensors go by, each once, and remembers what to compare the engine's with.

    watch = Watch(version=3)
    buckets = list(pack(watch.over(backend.weights())))
    watch.check                                     # WeightsCheck(names=("model.embed_tokens.weight", ...), samples=...)
    """

    def __init__(self, version: int):
        self._version = version
        self._names: list[str] = []
        self._chosen: dict[bool, list[tuple[int, WeightsSample]]] = {False: [], True: []}
        """By whether they are an expert's: most tensors of a mixture are, and others would hardly ever be chosen."""

    def over(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._names.append(name)
            self._consider(name, tensor)
            yield name, tensor

    @property
    def check(self) -> WeightsCheck:
        samples = [sample for chosen in self._chosen.values() for _, sample in chosen]
        # Not before now: a device would have to wait for each.
        return WeightsCheck(tuple(self._names), tuple(replace(sample, values=sample.values.cpu()) for sample in samples))

    def _consider(self, name: str, tensor: Tensor) -> None:
        """The tensors with the highest lots are chosen."""
        chosen, lot = self._chosen[is_experts(name)], derive_seed(self._version, "weights check", name)
        if len(chosen) < TENSORS:
            heapq.heappush(chosen, (lot, _sample(name, tensor, lot)))
        elif lot > chosen[0][0]:
            heapq.heapreplace(chosen, (lot, _sample(name, tensor, lot)))


def _sample(name: str, tensor: Tensor, seed: int) -> WeightsSample:
    width = tensor.shape[-1]
    columns = sorted(random.Random(seed).sample(range(width), min(COLUMNS, width)))
    return WeightsSample(name, tuple(columns), tensor.detach()[..., columns])
