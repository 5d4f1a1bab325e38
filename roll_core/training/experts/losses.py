"""Balance loss and z-loss of the routers of a mixture of experts. Both backends give the same losses, however a batch is
packed and sharded.

Both losses are means over the trained tokens of an optimizer step, taken in each layer at the positions that predict these
tokens, and summed over layers. f_e is the fraction of choices that fell on expert e, P_e the mean probability of e before
the top-k choice:
balance = E sum_e f_e P_e, which is 1 if all experts are used alike (Switch Transformers, arXiv 2101.03961);
z = mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906).
Gradients take f_e from the optimizer step before, over all ranks. The balance loss is then a sum over tokens that do not
depend on each other. Metrics take f_e and P_e from the same step.

Shapes: L layers, E experts, t tokens of a rank that pass through a layer.
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
"""Checkpoint file with the fractions f_e of the last optimizer step, layer by layer."""


class RouterLosses:
    """Balance loss and z-loss of all routers on this rank. `scale` undoes the backend's gradient averaging (world size for
    FSDP)."""

    def __init__(self, config: ExpertsConfig, num_layers: int, num_experts: int, device: torch.device, scale: float):
        self._config = config
        self._scale = scale
        self._shares_LE: Tensor | None = None
        columns = (num_experts, num_experts, 1, 1) if config.has_losses else (0, 0, 0, 0)
        self._columns = columns  # choices, probabilities, squares, weights
        self._sums = torch.zeros(num_layers, sum(columns), dtype=torch.float64, device=device)

    def attach(self, layer: int, gates: Tensor, logits_tE: Tensor, chosen_tE: Tensor, weights_t: Tensor) -> Tensor:
        """Return `gates` with the losses attached: a backward pass through the gates also gives the router the gradients of
        the losses. `weights_t` are the weights of the tokens in a mean over the optimizer step."""
        if not self._config.has_losses:
            return gates
        logits_tE, weights_t1 = logits_tE.float(), weights_t[:, None]
        # Elementwise: autocast would round matrix products to bfloat16.
        probabilities_E = (weights_t1 * logits_tE.softmax(dim=1)).sum(dim=0)
        square = (weights_t * logits_tE.logsumexp(dim=1).square()).sum()
        choices_E = (weights_t1 * chosen_tE).sum(dim=0)
        sums = torch.cat([choices_E, probabilities_E.detach(), square.detach()[None], weights_t.sum()[None]])
        self._sums[layer] += sums
        loss = self._config.z_loss * square
        if self._shares_LE is not None:
            loss = loss + self._config.balance_loss * len(choices_E) * (self._shares_LE[layer] * probabilities_E).sum()
        return _AttachLoss.apply(gates, self._scale * loss)

    def metrics(self) -> Metrics:
        """Loss metrics of the optimizer step that ends here, over all ranks. Keep its fractions f_e for the gradients of the
        next step."""
        if not self._sums.numel():
            return {}
        sums = reduce_over_ranks(self._sums.clone())
        self.discard()
        choices_LE, probabilities_LE, squares_L1, weights_L1 = sums.split(self._columns, dim=1)
        shares_LE = choices_LE / choices_LE.sum(dim=1, keepdim=True).clamp(min=1e-30)
        self._shares_LE = shares_LE.to(self._sums.device, torch.float32)
        sees_tokens_L = weights_L1[:, 0] > 0  # layers without experts have no tokens
        if not sees_tokens_L.any():
            return {}
        balance_L = shares_LE.shape[1] * (shares_LE * probabilities_LE / weights_L1).sum(dim=1)
        z_L = (squares_L1 / weights_L1)[:, 0]
        values = {"balance_loss": balance_L, "z_loss": z_L}
        return {f"{EXPERTS}{name}": value_L[sees_tokens_L].mean().item() for name, value_L in values.items()}

    def discard(self) -> None:
        """Reset the sums of the current optimizer step."""
        self._sums.zero_()

    @property
    def shares(self) -> list[list[float]] | None:
        """Fractions f_e of the last optimizer step, layer by layer, to store in a checkpoint; None before the first step."""
        return None if self._shares_LE is None else self._shares_LE.tolist()

    def load(self, folder: Path) -> None:
        """Read the fractions f_e of a checkpoint. A checkpoint written without these losses has none, and the first step
        after it no balance gradient."""
        file = folder / SHARES_FILE
        if self._config.has_losses:
            self._shares_LE = torch.tensor(json.loads(file.read_text()), device=self._sums.device) if file.exists() else None


def write_shares(shares: list[list[float]] | None, folder: Path) -> list[Path]:
    """Write the fractions f_e into a checkpoint folder and return the files written. Only one rank calls this."""
    if shares is None:
        return []
    (folder / SHARES_FILE).write_text(json.dumps(shares))
    return [folder / SHARES_FILE]


class _AttachLoss(torch.autograd.Function):
    """Identity of `value` whose backward pass also gives `loss` a gradient of 1."""

    @staticmethod
    def forward(_: Any, value: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG004
        return value.view_as(value)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), device=gradient.device)
