"""LoRA: linear layers with a trained low-rank update, and weights with the updates merged in.

Shapes: I input features, O output features, K rank; other dimensions come first.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from roll_core.config.training.lora import LoraConfig


class LoraLinear(nn.Module):
    """Frozen linear layer with a trained low-rank update. The update is zero at first, since one of its two matrices is."""

    def __init__(self, linear: nn.Linear, config: LoraConfig, generator: torch.Generator):
        super().__init__()
        self.linear = linear
        self.down_KI = nn.Parameter(torch.empty(config.rank, linear.in_features))
        self.up_OK = nn.Parameter(torch.zeros(linear.out_features, config.rank))
        self.scale = config.alpha / config.rank
        nn.init.kaiming_uniform_(self.down_KI, a=math.sqrt(5), generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        learned = functional.linear(functional.linear(hidden, self.down_KI), self.up_OK)
        return self.linear(hidden) + self.scale * learned


def add_adapters(model: nn.Module, config: LoraConfig, seed: int) -> None:
    """Freeze a model and replace its target layers by LoRA layers, in place. All ranks draw the same matrices from
    `seed`."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if isinstance(module, nn.Linear) and name in config.targets:
            setattr(model.get_submodule(parent), name, LoraLinear(module, config, generator))


def merged_parameters(parameters: Iterable[tuple[str, Tensor]], config: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters under their names without LoRA, with the low-rank updates added to the weights."""
    learned: dict[str, Tensor] = {}
    for name, tensor in parameters:
        path, _, kind = name.rpartition(".")
        if kind in ("down_KI", "up_OK"):  # come before the layer's own parameters
            learned[kind] = tensor
        elif path.endswith(".linear"):
            if kind == "weight":
                tensor = tensor + config.alpha / config.rank * (learned["up_OK"] @ learned["down_KI"])
            yield f"{path.removesuffix('.linear')}.{kind}", tensor
        else:
            yield name, tensor
