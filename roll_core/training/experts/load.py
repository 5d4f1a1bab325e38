"""Load statistics of the experts of a mixture of experts: how evenly the tokens of training use them. Prompt tokens count,
padding does not.

Shapes: L layers, E experts, t tokens of a rank that pass through a layer.
"""

import torch
from torch import Tensor

from roll_core.config.training.experts import EXPERTS
from roll_core.types.manifest import Metrics
from roll_core.weights.ranks import reduce_over_ranks


class ExpertLoad:
    """Counter of the tokens of every expert between two optimizer steps. Both layers and tokens may be spread over several
    ranks."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device):
        self._counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)

    def record(self, layer: int, chosen_tE: Tensor, is_counted_t: Tensor) -> None:
        """Add the experts chosen for the tokens of a micro-batch, except where `is_counted_t` is false (padding)."""
        self._counts_LE[layer] += (chosen_tE.bool() & is_counted_t[:, None]).sum(dim=0)

    def discard(self) -> None:
        """Reset all counts."""
        self._counts_LE.zero_()

    def metrics(self) -> Metrics:
        """Load metrics over the tokens of all ranks since the last call; this resets the counts. Empty for a model without
        experts."""
        if not self._counts_LE.numel():
            return {}
        counts_LE = reduce_over_ranks(self._counts_LE.clone())
        self.discard()
        return {f"{EXPERTS}{name}": value for name, value in load_metrics(counts_LE).items()}


def load_metrics(counts_LE: Tensor) -> Metrics:
    """Compute load metrics from token counts. A load is an expert's tokens over the mean of its layer. Layers without
    experts, which have no counts, are left out."""
    counts_LE = counts_LE[counts_LE.sum(dim=1) > 0].double()
    if not len(counts_LE):
        return {}
    load_L = counts_LE.max(dim=1).values / counts_LE.mean(dim=1)
    return {
        "max_load": load_L.max().item(),
        "mean_max_load": load_L.mean().item(),
        "idle_share": (counts_LE == 0).double().mean().item(),
    }
