"""The balance loss and the z-loss of a mixture's routers, the same by both backends, however a batch is cut and spread.

Both are means over the trained tokens of an optimizer step, taken in each layer where these are predicted, and summed over
layers. With f_e the share of choices that fell on expert e, and P_e the mean probability of e before any is chosen:
balance = E sum_e f_e P_e, which is 1 if all are used alike (Switch Transformers, arXiv 2101.03961);
z = mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906).
Gradients take f_e of the optimizer step before, by all ranks: what is left is a sum over tokens, which needs no other token.
Metrics take f_e and P_e of the same step. Shapes: L layers, E experts, t tokens of a rank that go through a layer.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_core.config.training.experts import EXPERTS, ExpertsConfig
from roll_core.types.manifest import Metrics
from roll_core.weights.ranks import reduce_over_ranks

SHARES_FILE = "expert-shares.json"
"""In checkpoints: f_e of the last optimizer step, layer by layer."""


class RouterLosses:
    """`scale`: by what the backend divides gradients that it should add up."""

    def __init__(self, config: ExpertsConfig, num_layers: int, num_experts: int, device: torch.device, scale: float):
        self._config = config
        self._scale = scale
        self._shares_LE: Tensor | None = None
        columns = (num_experts, num_experts, 1, 1) if config.has_losses else (0, 0, 0, 0)
        self._columns = columns  # choices, probabilities, squares, weights
        self._sums = torch.zeros(num_layers, sum(columns), dtype=torch.float64, device=device)

    def attach(self, layer: int, gates: Tensor, logits_tE: Tensor, chosen_tE: Tensor, weights_t: Tensor) -> Tensor:
        """The gates, through which the losses' gradients reach the router, too. Weights are those of a mean over a step."""
        if not self._config.has_losses:
            return gates
        logits_tE, weights_t1 = logits_tE.float(), weights_t[:, None]
        # Not by matrix products, which are rounded to bfloat16 where the arithmetic of the model is.
        probabilities_E = (weights_t1 * logits_tE.softmax(dim=1)).sum(dim=0)
        square = (weights_t * logits_tE.logsumexp(dim=1).square()).sum()
        choices_E = (weights_t1 * chosen_tE).sum(dim=0)
        noted = torch.cat([choices_E, probabilities_E.detach(), square.detach()[None], weights_t.sum()[None]])
        self._sums[layer] += noted
        loss = self._config.z_loss * square
        if self._shares_LE is not None:
            loss = loss + self._config.balance_loss * len(choices_E) * (self._shares_LE[layer] * probabilities_E).sum()
        return _WithLoss.apply(gates, self._scale * loss)

    def metrics(self) -> Metrics:
        """Of the optimizer step that ends here, over all ranks; its shares are those of the next one's gradients."""
        if not self._sums.numel():
            return {}
        sums = reduce_over_ranks(self._sums.clone())
        self.discard()
        choices_LE, probabilities_LE, squares_L1, weights_L1 = sums.split(self._columns, dim=1)
        shares_LE = choices_LE / choices_LE.sum(dim=1, keepdim=True).clamp(min=1e-30)
        self._shares_LE = shares_LE.to(self._sums.device, torch.float32)
        sees_tokens_L = weights_L1[:, 0] > 0  # layers without experts see none
        if not sees_tokens_L.any():
            return {}
        balance_L = shares_LE.shape[1] * (shares_LE * probabilities_LE / weights_L1).sum(dim=1)
        z_L = (squares_L1 / weights_L1)[:, 0]
        values = {"balance_loss": balance_L, "z_loss": z_L}
        return {f"{EXPERTS}{name}": value_L[sees_tokens_L].mean().item() for name, value_L in values.items()}

    def discard(self) -> None:
        self._sums.zero_()

    @property
    def shares(self) -> list[list[float]] | None:
        """What a checkpoint has to have of them."""
        return None if self._shares_LE is None else self._shares_LE.tolist()

    def load(self, folder: Path) -> None:
        """From a checkpoint; one that was written without these losses has no shares, and the first step no balance."""
        file = folder / SHARES_FILE
        if self._config.has_losses:
            self._shares_LE = torch.tensor(json.loads(file.read_text()), device=self._sums.device) if file.exists() else None


def write_shares(shares: list[list[float]] | None, folder: Path) -> list[Path]:
    """The files that were written; by one rank."""
    if shares is None:
        return []
    (folder / SHARES_FILE).write_text(json.dumps(shares))
    return [folder / SHARES_FILE]


class _WithLoss(torch.autograd.Function):
    """Its first argument; a loss beside it gets the gradient 1 where that gets any."""

    @staticmethod
    def forward(_: Any, value: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG004
        return value.view_as(value)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), device=gradient.device)
