"""Recording of the experts that the tokens of a forward pass are routed to, for routing replay in the trainer.

Shapes: t tokens, L layers, k experts per token.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll_core.models.causal_lm import routers_of
from roll_core.types.routing import NOT_RECORDED, RoutedExperts


class ExpertRecorder:
    """Recorder of a mixture-of-experts model's routing decisions, by forward hooks on its routers."""

    def __init__(self, model: PreTrainedModel):
        routers = routers_of(model)
        assert routers, "a model without experts has nothing to record"
        self._num_layers = len(model.base_model.layers)
        self._num_experts = routers[min(routers)].num_experts
        self._chosen: dict[int, Tensor] = {}
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._record_choice, layer))

    def take(self) -> NDArray[np.int16]:
        """Return the experts of the tokens of the last forward pass [t, L x k], in input order; NOT_RECORDED in layers
        without experts."""
        first = next(iter(self._chosen.values()))
        experts_tLk = first.new_full((len(first), self._num_layers, first.shape[1]), NOT_RECORDED, dtype=torch.int16)
        for layer, chosen_tk in self._chosen.items():
            experts_tLk[:, layer] = chosen_tk.to(torch.int16)
        return experts_tLk.flatten(1).cpu().numpy()

    def pack(self, parts: list[NDArray[np.int16]]) -> RoutedExperts:
        """Concatenate the experts of one context that several forward passes computed."""
        return RoutedExperts.from_array(np.concatenate(parts), self._num_experts)

    def _record_choice(self, layer: int, _: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen[layer] = output[2]
