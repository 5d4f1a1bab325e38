"""Checks that an engine holds exactly the trainer's weights.

A check has the names of all tensors and some columns of a few tensors, recorded before the weights travel. The version
number decides which tensors and columns are sampled, so that over several updates all tensors get checked.
"""

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from roll_core.models.checkpoint_names import is_expert_tensor
from roll_core.seeds import derive_seed

SAMPLED_TENSORS, SAMPLED_COLUMNS = 8, 16
"""Tensors sampled per update, and the most columns sampled of each. A mistake in names or layout affects many tensors, so
a small sample finds it at once, and the sample costs nothing."""
SAMPLE_ELEMENTS = 2**17
"""Most elements sampled of one tensor, unless a single column has more. Columns of an embedding are long: sixteen of them
would take longer to travel than a whole policy does within a GPU."""


@dataclass(frozen=True, eq=False)
class WeightsSample:
    """Sampled columns of one tensor, with the trainer's values.

    Example: WeightsSample("model.layers.0.mlp.up_proj.weight", columns=(3, 17), values=<192 x 2>)
    """

    name: str
    columns: tuple[int, ...]
    """Indices into the last dimension."""
    values: Tensor


@dataclass(frozen=True)
class WeightsCheck:
    """Expected names and sampled values that an engine compares its weights with after an update."""

    names: tuple[str, ...]
    """Names of all tensors of the policy."""
    samples: tuple[WeightsSample, ...]


class CheckRecorder:
    """Pass-through over a stream of tensors that records a WeightsCheck.

    recorder = CheckRecorder(version=3)
    buckets = list(pack(recorder.observe(backend.weights())))
    recorder.check                                  # WeightsCheck(names=("model.embed_tokens.weight", ...), samples=...)
    """

    def __init__(self, version: int):
        self._version = version
        self._names: list[str] = []
        self._drawn: dict[bool, list[tuple[int, WeightsSample]]] = {False: [], True: []}
        """Heaps of (lottery ticket, sample), keyed by whether the tensors belong to an expert. Expert tensors are drawn
        separately, since they are most tensors of a MoE model and the others would hardly ever be drawn."""

    def observe(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged and record their names and samples. Each tensor must be seen once."""
        for name, tensor in tensors:
            self._names.append(name)
            self._sample_if_drawn(name, tensor)
            yield name, tensor

    @property
    def check(self) -> WeightsCheck:
        """Check of the tensors observed so far."""
        return _check(self._names, [sample for drawn in self._drawn.values() for _, sample in drawn])

    def _sample_if_drawn(self, name: str, tensor: Tensor) -> None:
        """Sample the tensor if its lottery ticket is among the highest so far."""
        drawn, ticket = self._drawn[is_expert_tensor(name)], _lottery_ticket(self._version, name)
        if len(drawn) < SAMPLED_TENSORS:
            heapq.heappush(drawn, (ticket, _sample(name, tensor, ticket)))
        elif ticket > drawn[0][0]:
            heapq.heapreplace(drawn, (ticket, _sample(name, tensor, ticket)))


def check_in_place(version: int, tensors: Sequence[tuple[str, Tensor]]) -> WeightsCheck:
    """Build the check that a `CheckRecorder` would record, for tensors that are all available at once. Only drawn tensors
    are read."""
    named, samples = dict(tensors), []
    tickets = {name: _lottery_ticket(version, name) for name in named}
    for are_experts in (False, True):
        candidates = [name for name in named if is_expert_tensor(name) is are_experts]
        drawn = heapq.nlargest(SAMPLED_TENSORS, candidates, key=tickets.__getitem__)
        samples += [_sample(name, named[name], tickets[name]) for name in drawn]
    return _check(list(named), samples)


def _check(names: Sequence[str], samples: Sequence[WeightsSample]) -> WeightsCheck:
    # Copied to the host only now: each copy makes the host wait for the device.
    return WeightsCheck(tuple(names), tuple(replace(sample, values=sample.values.cpu()) for sample in samples))


def _lottery_ticket(version: int, name: str) -> int:
    """Pseudo-random number of a tensor in a version; the tensors with the highest are sampled."""
    return derive_seed(version, "weights check", name)


def _sample(name: str, tensor: Tensor, seed: int) -> WeightsSample:
    width = tensor.shape[-1]
    count = min(SAMPLED_COLUMNS, width, max(1, SAMPLE_ELEMENTS * width // tensor.numel()))
    columns = sorted(random.Random(seed).sample(range(width), count))
    return WeightsSample(name, tuple(columns), tensor.detach()[..., columns])
