"""What becomes of the choices of a policy's routers while it learns: how evenly they use experts, and losses that change it.

Shapes: L layers, E experts, t tokens of a rank that go through a layer, C notes of a token (`MicroBatch.routing_notes`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.experts import ExpertsConfig
from roll_core.training.expert_load import ExpertLoad
from roll_core.training.router_losses import RouterLosses
from roll_core.types.manifest import Metrics


class Routers:
    """Those of a policy in training, on this rank."""

    def __init__(self, config: ExpertsConfig, num_layers: int, num_experts: int, device: torch.device, scale: float = 1.0):
        self.losses = RouterLosses(config, num_layers, num_experts, device, scale)
        self._load = ExpertLoad(num_layers, num_experts, device)
        self._step_tokens = 1.0

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Gradients of these come next: some of one optimizer step."""
        self._step_tokens = micro_batches[0].counts.tokens

    def learn(self, layer: int, notes_tC: Tensor, logits_tE: Tensor, gates: Tensor, chosen_tE: Tensor) -> Tensor:
        """Note what a router chose, if it is trained by it; its gates, through which it learns."""
        if not torch.is_grad_enabled():
            return gates
        predicts_t = notes_tC[:, 0]
        self._load.note(layer, chosen_tE, predicts_t >= 0)
        return self.losses.attach(layer, gates, logits_tE, chosen_tE, predicts_t.clamp(min=0).float() / self._step_tokens)

    def metrics(self) -> Metrics:
        """Of the optimizer step that ends here."""
        return self._load.metrics() | self.losses.metrics()

    def discard(self) -> None:
        self._load.discard()
        self.losses.discard()
