"""Mapping between the tensors of megatron-core's GPT models and Hugging Face checkpoints: one table per architecture.

Megatron's `sharded_state_dict` says which slice of which global tensor each parameter of a rank is. A table therefore maps
global tensors only, independently of the parallel layout. Each global tensor consists of rows of Hugging Face tensors:

decoder.layers.mlp.linear_fc1.weight, layer 3: the rows of model.layers.3.mlp.gate_proj.weight, then those of .up_proj.
decoder.layers.self_attention.linear_qkv.weight: for each key-value head the rows of its queries, its key, its value
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


class RowOrder(Enum):
    """Order of Hugging Face rows within a Megatron tensor."""

    CONCATENATED = auto()
    """One tensor after another."""
    BY_KEY_VALUE_HEAD = auto()
    """Interleaved by key-value head: for each head its rows of every tensor."""
    PADDED = auto()
    """One tensor, then padding rows that make the vocabulary divisible."""


@dataclass(frozen=True)
class RowMapping:
    """Hugging Face tensors whose rows make up one Megatron tensor. All have the same number of rows, except queries."""

    tensors: tuple[str, ...]
    """Names of the Hugging Face tensors, without the layer."""
    order: RowOrder = RowOrder.CONCATENATED


Table = dict[str, RowMapping]
"""Row mappings by Megatron's name. Names on both sides omit the layer; entries follow Hugging Face's order within a
layer."""

_EMBEDDING: Table = {"embedding.word_embeddings.weight": RowMapping(("model.embed_tokens.weight",), RowOrder.PADDED)}
_OUTPUT: Table = {
    "decoder.final_layernorm.weight": RowMapping(("model.norm.weight",)),
    "output_layer.weight": RowMapping(("lm_head.weight",), RowOrder.PADDED),
}
_ATTENTION: Table = {
    "self_attention.linear_qkv.weight": RowMapping(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), RowOrder.BY_KEY_VALUE_HEAD
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
_KEY_ALIASES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Alternative names of norms that Megatron builds as separate modules."""

LAYERS: dict[Architecture, Table] = {
    Architecture.QWEN3: _ATTENTION | _HEAD_NORMS | _DENSE | _NORMS,
    Architecture.QWEN3_MOE: _ATTENTION | _HEAD_NORMS | _DENSE | _EXPERTS | _NORMS,
    Architecture.LLAMA: _ATTENTION | _DENSE | _NORMS,
}
"""Tables of the tensors within a layer, by architecture. A mixture-of-experts model may have dense layers, too."""

_LAYER_KEY = re.compile(r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<name>.+)")


class RowRange(NamedTuple):
    """Range of rows of a Megatron tensor: rows `start` to `stop` equal the rows of a Hugging Face tensor from
    `tensor_start` on."""

    start: int
    stop: int
    name: str
    """Checkpoint name of the Hugging Face tensor."""
    tensor_start: int


class MegatronNames:
    """Name mapping of one model.

    A global tensor is identified by Megatron's key and, where several tensors are stacked under one key, by its index among
    them: ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (3, 7)) is layer 3, expert 7.
    """

    def __init__(self, config: PretrainedConfig):
        self._layers = LAYERS[architecture_of(config)]
        self._config = config
        self._queries_per_key_value_head = config.num_attention_heads // config.num_key_value_heads
        self._outside_layers = dict(_EMBEDDING | _OUTPUT)
        if config.tie_word_embeddings:
            del self._outside_layers["output_layer.weight"]
        self.checkpoint_names = tuple(self._list_checkpoint_names())
        """Names of all checkpoint tensors, in the order of the model's parameters."""

    def row_ranges(self, key: str, index: tuple[int, ...], num_rows: int) -> tuple[RowRange, ...]:
        """Row ranges that make up a global tensor of `num_rows` rows, in order and without padding."""
        mapping, layer, expert = self._mapping_of(key, index)
        names = tuple(self._checkpoint_name(name, layer, expert) for name in mapping.tensors)
        match mapping.order:
            case RowOrder.CONCATENATED:
                return tuple(_interleave(names, (1,) * len(names), 1, num_rows))
            case RowOrder.BY_KEY_VALUE_HEAD:
                return tuple(
                    _interleave(names, (self._queries_per_key_value_head, 1, 1), self._config.num_key_value_heads, num_rows)
                )
            case RowOrder.PADDED:
                return (RowRange(0, min(num_rows, self._config.vocab_size), names[0], 0),)

    def _mapping_of(self, key: str, index: tuple[int, ...]) -> tuple[RowMapping, int | None, int | None]:
        """Row mapping of a key, with the layer and expert number that key and index denote."""
        if key in self._outside_layers:
            return self._outside_layers[key], None, None
        matched = _LAYER_KEY.fullmatch(key)
        mapping = matched and self._layers.get(_KEY_ALIASES.get(matched["name"], matched["name"]))
        if matched is None or mapping is None:
            raise RollError(f"megatron has a tensor {key}, for which {self._config.model_type} has no name")
        layer, *expert = index if matched["layer"] is None else (int(matched["layer"]), *index)
        return mapping, layer, expert[0] if expert else None

    def _checkpoint_name(self, name: str, layer: int | None, expert: int | None) -> str:
        """Checkpoint name of a table's tensor name in a layer; None for the layer means outside the layers."""
        return name if layer is None else f"model.layers.{layer}.{name.format(expert=expert)}"

    def _list_checkpoint_names(self) -> Iterator[str]:
        yield from (name for mapping in _EMBEDDING.values() for name in mapping.tensors)
        for layer in range(self._config.num_hidden_layers):
            absent = _DENSE if _has_experts(self._config, layer) else _EXPERTS
            for key, mapping in self._layers.items():
                if key not in absent:
                    experts = range(self._config.num_experts) if "{expert}" in mapping.tensors[0] else (None,)
                    yield from (self._checkpoint_name(name, layer, expert) for expert in experts for name in mapping.tensors)
        yield from (name for key, mapping in self._outside_layers.items() if key in _OUTPUT for name in mapping.tensors)


def architecture_of(config: PretrainedConfig) -> Architecture:
    """Architecture of a Hugging Face config; raise RollError if there is no table for it."""
    try:
        return Architecture(config.model_type)
    except ValueError:
        known = ", ".join(LAYERS)
        raise RollError(f"model: training.backend megatron knows {known}, and this is {config.model_type}") from None


def _interleave(names: tuple[str, ...], blocks: tuple[int, ...], num_repeats: int, num_rows: int) -> Iterator[RowRange]:
    """Yield the row ranges of a repeating pattern: `blocks[i]` blocks of rows of tensor i, for each tensor in order. The
    pattern repeats `num_repeats` times and covers `num_rows` rows."""
    assert num_rows % (num_repeats * sum(blocks)) == 0, f"{num_rows} rows of {names} are not {num_repeats} times {blocks}"
    block_rows, start = num_rows // (num_repeats * sum(blocks)), 0
    for repeat in range(num_repeats):
        for name, num_blocks in zip(names, blocks, strict=True):
            yield RowRange(start, start + num_blocks * block_rows, name, repeat * num_blocks * block_rows)
            start += num_blocks * block_rows


def _has_experts(config: PretrainedConfig, layer: int) -> bool:
    """True if a layer is a mixture of experts."""
    if config.model_type != Architecture.QWEN3_MOE:
        return False
    return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0
