"""Which experts the tokens of a forward pass went to, for engines that tell. Shapes: t tokens, L layers, k experts each."""

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
    def __init__(self, model: PreTrainedModel):
        routers = routers_of(model)
        assert routers, "a model without experts has nothing to record"
        self._num_layers = len(model.base_model.layers)
        self._num_experts = routers[min(routers)].num_experts
        self._chosen: dict[int, Tensor] = {}
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._note, layer))

    def take(self) -> NDArray[np.int16]:
        """What the tokens of the last forward pass went to [t, L x k], in the order in which they were given."""
        first = next(iter(self._chosen.values()))
        experts_tLk = first.new_full((len(first), self._num_layers, first.shape[1]), NOT_RECORDED, dtype=torch.int16)
        for layer, chosen_tk in self._chosen.items():
            experts_tLk[:, layer] = chosen_tk.to(torch.int16)
        return experts_tLk.flatten(1).cpu().numpy()

    def pack(self, parts: list[NDArray[np.int16]]) -> RoutedExperts:
        """Tokens of one context that came in several passes."""
        return RoutedExperts.of(np.concatenate(parts), self._num_experts)

    def _note(self, layer: int, _: nn.Module, __: Any, answered: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen[layer] = answered[2]
