"""Conversion between a model's parameter names and the tensor names of Hugging Face checkpoints.

The names differ for experts only. In memory the experts of a layer are stacked into two tensors. In checkpoints, and for
every engine, each expert has three tensors of its own:

model.layers.0.mlp.experts.gate_up_proj [E, 2I, H] <-> model.layers.0.mlp.experts.3.gate_proj.weight [I, H], .up_proj. [I, H]
model.layers.0.mlp.experts.down_proj    [E, H, I]  <-> model.layers.0.mlp.experts.3.down_proj.weight [H, I]

Shapes: E experts, I intermediate features, H hidden features.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor

_EXPERTS = re.compile(r"(?P<layer>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)$")
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<kind>gate|up|down)_proj\.weight$")


def to_checkpoint_names(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters under checkpoint names. Stacked expert tensors are split into views, one per expert and
    projection."""
    for name, tensor in parameters:
        stacked = _EXPERTS.match(name)
        if stacked is None:
            yield name, tensor
            continue
        kinds = ("gate", "up") if stacked["kind"] == "gate_up_proj" else ("down",)
        for expert, matrix in enumerate(tensor):
            for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                yield f"{stacked['layer']}.{expert}.{kind}_proj.weight", part


def to_parameter_names(checkpoint: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield checkpoint tensors under parameter names, with experts stacked: the inverse of `to_checkpoint_names`. Tensors
    must come in the order that `to_checkpoint_names` yields."""
    for target, members in groupby(checkpoint, lambda named: _stacked_tensor(named[0])):
        if target is None:
            yield from members
            continue
        layer, kind = target
        parts = [tensor for _, tensor in members]
        if kind == "gate_up_proj":
            parts = [torch.cat([gate, up]) for gate, up in zip(parts[::2], parts[1::2], strict=True)]
        yield f"{layer}.{kind}", torch.stack(parts)


def is_expert_tensor(name: str) -> bool:
    """True if a checkpoint tensor belongs to an expert."""
    return _EXPERT.match(name) is not None


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Layer prefix, expert number and projection of an expert's tensor; None for other tensors.

    Example: ("model.layers.0.mlp.experts", 3, "gate")
    """
    expert = _EXPERT.match(name)
    return None if expert is None else (expert["layer"], int(expert["number"]), expert["kind"])


def _stacked_tensor(name: str) -> tuple[str, str] | None:
    """Layer prefix and name of the stacked tensor that an expert's tensor is part of; None for other tensors."""
    expert = _EXPERT.match(name)
    if expert is None:
        return None
    return expert["layer"], "down_proj" if expert["kind"] == "down" else "gate_up_proj"
