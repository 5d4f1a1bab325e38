"""What becomes of the choices of a policy's routers: how evenly they use experts, losses that change it, and choices that an
engine made before and that are made again (routing replay, R3: arXiv 2510.11370).

Shapes: L layers, E experts, t tokens of a rank that go through a layer, k experts that a token goes to, C notes of a token
(`MicroBatch.routing_notes`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.training.experts import EXPERTS, ExpertsConfig
from roll_core.training.experts.load import ExpertLoad
from roll_core.training.experts.losses import RouterLosses
from roll_core.types.manifest import Metrics
from roll_core.types.routing import NOT_RECORDED
from roll_core.weights.ranks import reduce_over_ranks


class Routers:
    """Those of a policy in training, on this rank."""

    def __init__(self, config: ExpertsConfig, num_layers: int, num_experts: int, device: torch.device, scale: float = 1.0):
        self.losses = RouterLosses(config, num_layers, num_experts, device, scale)
        self._load = ExpertLoad(num_layers, num_experts, device)
        self._replays = config.replay
        self._tokens = torch.zeros(2, dtype=torch.int64, device=device)
        """Those that were replayed, and all, once for each layer."""
        self._step_tokens = 1.0

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Gradients of these come next: some of one optimizer step."""
        self._step_tokens = micro_batches[0].counts.tokens

    def replayed(self, layer: int, notes_tC: Tensor, chosen_tk: Tensor) -> Tensor | None:
        """The experts that tokens went to before, and for tokens of which that is not known those that were chosen. None if
        it is known of no token, or does not matter."""
        if not self._replays or notes_tC.shape[1] == 1:
            return None
        first = 1 + layer * chosen_tk.shape[1]
        known_tk = notes_tC[:, first : first + chosen_tk.shape[1]].to(chosen_tk.dtype)
        return torch.where(known_tk == NOT_RECORDED, chosen_tk, known_tk)

    def learn(self, layer: int, notes_tC: Tensor, logits_tE: Tensor, gates: Tensor, chosen_tE: Tensor) -> Tensor:
        """Note what a router chose, if it is trained by it; its gates, through which it learns."""
        if not torch.is_grad_enabled():
            return gates
        predicts_t = notes_tC[:, 0]
        self._load.note(layer, chosen_tE, predicts_t >= 0)
        if self._replays:
            is_known_t = (notes_tC[:, 1:] != NOT_RECORDED).any(dim=1)
            self._tokens += torch.stack([is_known_t.sum(), (predicts_t >= 0).sum()])
        return self.losses.attach(layer, gates, logits_tE, chosen_tE, predicts_t.clamp(min=0).float() / self._step_tokens)

    def metrics(self) -> Metrics:
        """Of the optimizer step that ends here."""
        return self._load.metrics() | self.losses.metrics() | self._replayed_share()

    def _replayed_share(self) -> Metrics:
        """Of the tokens; what keeps it below 1 are those that nobody recorded, the last of every completion among them."""
        if not self._replays:
            return {}
        replayed, all_of_them = reduce_over_ranks(self._tokens.clone()).tolist()
        self._tokens.zero_()
        return {f"{EXPERTS}replayed_share": replayed / all_of_them} if all_of_them else {}

    def discard(self) -> None:
        self._tokens.zero_()
        self._load.discard()
        self.losses.discard()
