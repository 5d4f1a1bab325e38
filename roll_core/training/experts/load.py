"""How evenly a mixture's experts are used by the tokens it is trained on, prompts included and padding not.

Shapes: L layers, E experts, t tokens of a rank that go through a layer.
"""

import torch
from torch import Tensor

from roll_core.config.training.experts import EXPERTS
from roll_core.types.manifest import Metrics
from roll_core.weights.ranks import reduce_over_ranks


class ExpertLoad:
    """Counts the tokens of every expert between two optimizer steps. Layers may be on several ranks, and so may tokens."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device):
        self._counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)

    def note(self, layer: int, chosen_tE: Tensor, counts_t: Tensor) -> None:
        """Which experts the tokens of a micro-batch go to, of those that count."""
        self._counts_LE[layer] += (chosen_tE.bool() & counts_t[:, None]).sum(dim=0)

    def discard(self) -> None:
        self._counts_LE.zero_()

    def metrics(self) -> Metrics:
        """Of the tokens of all ranks since this was asked last; none for a model without experts."""
        if not self._counts_LE.numel():
            return {}
        counts_LE = reduce_over_ranks(self._counts_LE.clone())
        self.discard()
        return {f"{EXPERTS}{name}": value for name, value in quantities(counts_LE).items()}


def quantities(counts_LE: Tensor) -> Metrics:
    """A load is an expert's tokens over the mean of its layer. Layers without experts, which see no tokens, do not count."""
    counts_LE = counts_LE[counts_LE.sum(dim=1) > 0].double()
    if not len(counts_LE):
        return {}
    load_L = counts_LE.max(dim=1).values / counts_LE.mean(dim=1)
    return {
        "max_load": load_L.max().item(),
        "mean_max_load": load_L.mean().item(),
        "idle_share": (counts_LE == 0).double().mean().item(),
    }
