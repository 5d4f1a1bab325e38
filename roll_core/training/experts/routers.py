"""Processing of router choices in training: load statistics, auxiliary losses, and routing replay (R3, arXiv 2510.11370),
which repeats the experts that the engine chose while sampling. Both backends call it wherever a router has chosen.

Shapes: L layers, E experts, t tokens of a rank that pass through a layer, k experts per token, C routing notes per token
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
    """Load statistics, losses and replay of all routers of the policy in training, on this rank."""

    def __init__(self, config: ExpertsConfig, num_layers: int, num_experts: int, device: torch.device, scale: float = 1.0):
        self.losses = RouterLosses(config, num_layers, num_experts, device, scale)
        self._load = ExpertLoad(num_layers, num_experts, device)
        self._replays = config.replay
        self._token_counts = torch.zeros(2, dtype=torch.int64, device=device)
        """Replayed tokens and all tokens, each counted once per layer."""
        self._step_tokens = 1.0

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the token denominator for the micro-batches that follow, all of one optimizer step."""
        self._step_tokens = micro_batches[0].counts.tokens

    def replayed_choice(self, layer: int, notes_tC: Tensor, chosen_tk: Tensor) -> Tensor | None:
        """Return the experts recorded by the engine, and `chosen_tk` for tokens without a record. Return None if replay is
        off or the micro-batch has no records at all."""
        if not self._replays or notes_tC.shape[1] == 1:
            return None
        first = 1 + layer * chosen_tk.shape[1]
        known_tk = notes_tC[:, first : first + chosen_tk.shape[1]].to(chosen_tk.dtype)
        return torch.where(known_tk == NOT_RECORDED, chosen_tk, known_tk)

    def record_choice(self, layer: int, notes_tC: Tensor, logits_tE: Tensor, gates: Tensor, chosen_tE: Tensor) -> Tensor:
        """Record a router's choice if gradients are enabled. Return its gates with the auxiliary losses attached."""
        if not torch.is_grad_enabled():
            return gates
        predicts_t = notes_tC[:, 0]
        self._load.record(layer, chosen_tE, predicts_t >= 0)
        if self._replays:
            is_known_t = (notes_tC[:, 1:] != NOT_RECORDED).any(dim=1)
            self._token_counts += torch.stack([is_known_t.sum(), (predicts_t >= 0).sum()])
        return self.losses.attach(layer, gates, logits_tE, chosen_tE, predicts_t.clamp(min=0).float() / self._step_tokens)

    def metrics(self) -> Metrics:
        """Load, loss and replay metrics of the optimizer step that ends here."""
        return self._load.metrics() | self.losses.metrics() | self._replayed_share()

    def _replayed_share(self) -> Metrics:
        """Fraction of the tokens that were replayed. Tokens without a record, such as the last one of every completion, keep
        it below 1."""
        if not self._replays:
            return {}
        replayed, total = reduce_over_ranks(self._token_counts.clone()).tolist()
        self._token_counts.zero_()
        return {f"{EXPERTS}replayed_share": replayed / total} if total else {}

    def discard(self) -> None:
        """Reset the statistics of the current optimizer step."""
        self._token_counts.zero_()
        self._load.discard()
        self.losses.discard()
