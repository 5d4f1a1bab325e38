"""What proves that engines hold the trainer's weights: every name, and columns of some tensors, taken before they travel.

Which tensors and which columns depends on the version, so that over several updates all are looked at.
"""

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from roll_core.models.checkpoint_names import is_experts
from roll_core.seeds import derive_seed

TENSORS, COLUMNS = 8, 16
"""Looked at in each update: a mistake in names or layout touches many tensors and shows at once, and it costs nothing."""
NUMBERS = 2**17
"""Of a tensor, unless a single column has more: columns of an embedding are long, and sixteen of them would take longer to
travel than a policy does within a GPU."""


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
        return _check(self._names, [sample for chosen in self._chosen.values() for _, sample in chosen])

    def _consider(self, name: str, tensor: Tensor) -> None:
        """The tensors with the highest lots are chosen."""
        chosen, lot = self._chosen[is_experts(name)], _lot(self._version, name)
        if len(chosen) < TENSORS:
            heapq.heappush(chosen, (lot, _sample(name, tensor, lot)))
        elif lot > chosen[0][0]:
            heapq.heapreplace(chosen, (lot, _sample(name, tensor, lot)))


def check_in_place(version: int, tensors: Sequence[tuple[str, Tensor]]) -> WeightsCheck:
    """What a watch would see, of tensors that stay where they are: all lots are drawn before any tensor is touched."""
    named, samples = dict(tensors), []
    lots = {name: _lot(version, name) for name in named}
    for of_experts in (False, True):
        candidates = [name for name in named if is_experts(name) is of_experts]
        chosen = heapq.nlargest(TENSORS, candidates, key=lots.__getitem__)
        samples += [_sample(name, named[name], lots[name]) for name in chosen]
    return _check(list(named), samples)


def _check(names: Sequence[str], samples: Sequence[WeightsSample]) -> WeightsCheck:
    # To the host not before now: a device would have to wait for each.
    return WeightsCheck(tuple(names), tuple(replace(sample, values=sample.values.cpu()) for sample in samples))


def _lot(version: int, name: str) -> int:
    return derive_seed(version, "weights check", name)


def _sample(name: str, tensor: Tensor, seed: int) -> WeightsSample:
    width = tensor.shape[-1]
    count = min(COLUMNS, width, max(1, NUMBERS * width // tensor.numel()))
    columns = sorted(random.Random(seed).sample(range(width), count))
    return WeightsSample(name, tuple(columns), tensor.detach()[..., columns])
