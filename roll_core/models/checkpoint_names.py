"""Weights by the names that Hugging Face checkpoints have. In memory the experts of a layer are stacked into two tensors; in
checkpoints, and for every engine, each expert has three of its own.

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


def as_checkpoint(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters under the names of a checkpoint; those of experts are views of what is given."""
    for name, tensor in parameters:
        stacked = _EXPERTS.match(name)
        if stacked is None:
            yield name, tensor
            continue
        kinds = ("gate", "up") if stacked["kind"] == "gate_up_proj" else ("down",)
        for expert, matrix in enumerate(tensor):
            for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                yield f"{stacked['layer']}.{expert}.{kind}_proj.weight", part


def as_parameters(checkpoint: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What `as_checkpoint` answers, put together again; it must be in that order."""
    for place, together in groupby(checkpoint, lambda named: _place(named[0])):
        if place is None:
            yield from together
            continue
        layer, kind = place
        parts = [tensor for _, tensor in together]
        if kind == "gate_up_proj":
            parts = [torch.cat([gate, up]) for gate, up in zip(parts[::2], parts[1::2], strict=True)]
        yield f"{layer}.{kind}", torch.stack(parts)


def is_experts(name: str) -> bool:
    """Whether a checkpoint's tensor is one expert's."""
    return _EXPERT.match(name) is not None


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Whose a checkpoint's tensor is, if it is an expert's: ("model.layers.0.mlp.experts", 3, "gate")."""
    expert = _EXPERT.match(name)
    return None if expert is None else (expert["layer"], int(expert["number"]), expert["kind"])


def _place(name: str) -> tuple[str, str] | None:
    """The stacked tensor that a checkpoint's tensor is part of."""
    expert = _EXPERT.match(name)
    if expert is None:
        return None
    return expert["layer"], "down_proj" if expert["kind"] == "down" else "gate_up_proj"
