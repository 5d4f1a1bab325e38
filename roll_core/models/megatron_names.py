"""The tensors of megatron-core's GPT models by the names that Hugging Face checkpoints have: a table per architecture.

Megatron says of every parameter of a rank which slice of which global tensor it is (`sharded_state_dict`). So a table maps
global tensors, and knows of no layout: each is, row by row, made of rows of Hugging Face tensors.

decoder.layers.mlp.linear_fc1.weight, layer 3: the rows of model.layers.3.mlp.gate_proj.weight, then those of .up_proj.
decoder.layers.self_attention.linear_qkv.weight: for each key head the rows of its queries, its own, those of its values
decoder.layers.mlp.experts.experts.linear_fc2.weight, layer 3, expert 7: model.layers.3.mlp.experts.7.down_proj.weight
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from transformers import PretrainedConfig

from roll_core.config.model import Architecture
from roll_core.errors import RollError


class Rows(Enum):
    """How the rows of Hugging Face tensors lie in Megatron's. IN_TURN: one tensor after another. BY_KEY_HEAD: for each head
    of keys its share of every tensor. PADDED: one tensor, then rows that mean nothing, so that the vocabulary divides."""

    IN_TURN = auto()
    BY_KEY_HEAD = auto()
    PADDED = auto()


@dataclass(frozen=True)
class RowMapping:
    """Of which Hugging Face tensors, each as tall as the others but queries, a Megatron tensor is made."""

    of: tuple[str, ...]
    rows: Rows = Rows.IN_TURN


Table = dict[str, RowMapping]
"""By Megatron's name; both names without the layer, in the order that Hugging Face has them in a layer."""

_EMBEDDING: Table = {"embedding.word_embeddings.weight": RowMapping(("model.embed_tokens.weight",), Rows.PADDED)}
_OUTPUT: Table = {
    "decoder.final_layernorm.weight": RowMapping(("model.norm.weight",)),
    "output_layer.weight": RowMapping(("lm_head.weight",), Rows.PADDED),
}
_ATTENTION: Table = {
    "self_attention.linear_qkv.weight": RowMapping(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), Rows.BY_KEY_HEAD
    ),
    "self_attention.linear_proj.weight": RowMapping(("self_attn.o_proj.weight",)),
}
_HEAD_NORMS: Table = {
    "self_attention.q_layernorm.weight": RowMapping(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": RowMapping(("self_attn.k_norm.weight",)),
}
_DENSE: Table = {
    "mlp.linear_fc1.weight": RowMapping(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": RowMapping(("mlp.down_proj.weight",)),
}
_EXPERTS: Table = {
    "mlp.experts.experts.linear_fc1.weight": RowMapping(
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
    ),
    "mlp.experts.experts.linear_fc2.weight": RowMapping(("mlp.experts.{expert}.down_proj.weight",)),
    "mlp.router.weight": RowMapping(("mlp.gate.weight",)),
}
_NORMS: Table = {
    "self_attention.linear_qkv.layer_norm_weight": RowMapping(("input_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": RowMapping(("post_attention_layernorm.weight",)),
}
_ALSO = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that are modules of their own go by these names."""

LAYERS: dict[Architecture, Table] = {
    Architecture.QWEN3: _ATTENTION | _HEAD_NORMS | _DENSE | _NORMS,
    Architecture.QWEN3_MOE: _ATTENTION | _HEAD_NORMS | _DENSE | _EXPERTS | _NORMS,
    Architecture.LLAMA: _ATTENTION | _DENSE | _NORMS,
}
"""Of a mixture some layers may be dense."""

_IN_A_LAYER = re.compile(r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<name>.+)")


class Part(NamedTuple):
    """Rows `start` to `stop` of a Megatron tensor are those of a Hugging Face tensor from `first` on."""

    start: int
    stop: int
    name: str
    first: int


class MegatronNames:
    """The table of one model. A global tensor is named by a key and, where several are stacked, by its index among them:
    ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (3, 7))."""

    def __init__(self, config: PretrainedConfig):
        self._layers = LAYERS[architecture_of(config)]
        self._config = config
        self._queries_per_key = config.num_attention_heads // config.num_key_value_heads
        self._ends = dict(_EMBEDDING | _OUTPUT)
        if config.tie_word_embeddings:
            del self._ends["output_layer.weight"]
        self.hugging_face = tuple(self._all_names())
        """All names of a checkpoint, in the order of the model's parameters."""

    def parts(self, key: str, index: tuple[int, ...], num_rows: int) -> tuple[Part, ...]:
        """Of which rows a global tensor of so many rows is made, from its first on; padding is left out."""
        made, layer, expert = self._made(key, index)
        names = tuple(self._in_checkpoint(name, layer, expert) for name in made.of)
        match made.rows:
            case Rows.IN_TURN:
                return tuple(_in_turn(names, (1,) * len(names), 1, num_rows))
            case Rows.BY_KEY_HEAD:
                return tuple(_in_turn(names, (self._queries_per_key, 1, 1), self._config.num_key_value_heads, num_rows))
            case Rows.PADDED:
                return (Part(0, min(num_rows, self._config.vocab_size), names[0], 0),)

    def _made(self, key: str, index: tuple[int, ...]) -> tuple[RowMapping, int | None, int | None]:
        """What a key means, of which layer and of which expert."""
        if key in self._ends:
            return self._ends[key], None, None
        inside = _IN_A_LAYER.fullmatch(key)
        made = inside and self._layers.get(_ALSO.get(inside["name"], inside["name"]))
        if inside is None or made is None:
            raise RollError(f"megatron has a tensor {key}, for which {self._config.model_type} has no name")
        layer, *expert = index if inside["layer"] is None else (int(inside["layer"]), *index)
        return made, layer, expert[0] if expert else None

    def _in_checkpoint(self, name: str, layer: int | None, expert: int | None) -> str:
        return name if layer is None else f"model.layers.{layer}.{name.format(expert=expert)}"

    def _all_names(self) -> Iterator[str]:
        yield from (name for made in _EMBEDDING.values() for name in made.of)
        for layer in range(self._config.num_hidden_layers):
            left_out = _DENSE if _is_mixture(self._config, layer) else _EXPERTS
            for key, made in self._layers.items():
                if key not in left_out:
                    experts = range(self._config.num_experts) if "{expert}" in made.of[0] else (None,)
                    yield from (self._in_checkpoint(name, layer, expert) for expert in experts for name in made.of)
        yield from (name for key, made in self._ends.items() if key in _OUTPUT for name in made.of)


def architecture_of(config: PretrainedConfig) -> Architecture:
    try:
        return Architecture(config.model_type)
    except ValueError:
        known = ", ".join(LAYERS)
        raise RollError(f"model: training.backend megatron knows {known}, and this is {config.model_type}") from None


def _in_turn(names: tuple[str, ...], shares: tuple[int, ...], times: int, num_rows: int) -> Iterator[Part]:
    """Of every tensor in turn a share of its rows, so many times that all are there."""
    assert num_rows % (times * sum(shares)) == 0, f"{num_rows} rows of {names} are not {times} times {shares}"
    unit, start = num_rows // (times * sum(shares)), 0
    for time in range(times):
        for name, share in zip(names, shares, strict=True):
            yield Part(start, start + share * unit, name, time * share * unit)
            start += share * unit


def _is_mixture(config: PretrainedConfig, layer: int) -> bool:
    if config.model_type != Architecture.QWEN3_MOE:
        return False
    return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0
