"""Layers that replace Megatron's: attention with arbitrary masks and context parallelism, experts computed as one grouped
matrix product, a router that reports its choices, and a norm. All other layers are Megatron's own, from Transformer Engine
where that is installed.

Shapes: T tokens of a row, on this rank; R rows; N tokens routed to this rank's experts; E experts on this rank; H hidden
features; I features inside an expert, of its gate or its up projection, on this rank.
"""

from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from roll_core.training.experts.routers import Routers

HAS_TRANSFORMER_ENGINE = find_spec("transformer_engine") is not None
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16: the router reads it even without Transformer Engine


def block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Layer specs of one pipeline chunk, with the layers of this file in place of Megatron's."""
    spec = deepcopy(get_gpt_decoder_block_spec(config, HAS_TRANSFORMER_ENGINE, normalization="RMSNorm", vp_stage=chunk))
    for layer in spec.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        attention.core_attention = Attention
        if config.num_moe_experts is not None and hasattr(parts.mlp.submodules, "experts"):
            parts.mlp.submodules.experts.module = Experts
            parts.mlp.submodules.router = ObservedRouter
        if not HAS_TRANSFORMER_ENGINE:
            parts.input_layernorm = parts.pre_mlp_layernorm = Norm
            if attention.q_layernorm is not IdentityOp:
                attention.q_layernorm = attention.k_layernorm = Norm
    if not HAS_TRANSFORMER_ENGINE:
        spec.layer_norm = Norm
    return spec


class Norm(nn.RMSNorm):
    """RMSNorm whose weight is marked sequence-parallel; Megatron's torch fallback is not."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(MegatronModule):
    """Attention by torch's scaled_dot_product_attention. A mask [R, 1, T, all tokens of the row] is true where a token may
    attend; without a mask each row is one causal sequence. With context parallelism, keys and values are gathered from all
    ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002
        attn_mask_type: Any,  # noqa: ARG002
        attention_type: str,  # noqa: ARG002
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ):
        super().__init__(config=config)
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout), "attention has no dropout"
        self._scale = softmax_scale
        self._context_group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any, **__: Any
    ) -> Tensor:
        if self._context_group.size() > 1:
            assert attention_mask is not None, "rows that are shared out need a mask"
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self._context_group) for x in (key, value)
            )
        # [T, R, heads, features] -> [R, heads, T, features]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if attention_mask is not None:
            # On a GPU, a mask together with grouped-query attention would select a kernel that stores all scores.
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None, scale=self._scale, enable_gqa=True
        )
        return attended.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class ObservedRouter(TopKRouter):
    """Router of Megatron that reports its choices to an observer, and repeats the choices that the observer replays."""

    observer: Routers | None = None
    """Load statistics, losses and replay of the policy in training; None for a frozen policy."""
    notes_tC: Tensor
    """Routing notes of the tokens of the next forward pass."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.router_replay = _ReplayHook(self)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        gates_tE, chosen_tE = super().routing(logits, padding_mask)
        if self.observer is None:
            return gates_tE, chosen_tE
        logits_tE = logits.view(-1, self.num_experts)
        return self.observer.record_choice(self.layer_number - 1, self.notes_tC, logits_tE, gates_tE, chosen_tE), chosen_tE


class _ReplayHook:
    """Implementation of Megatron's router replay: chooses the experts of tokens, given a router's scores."""

    def __init__(self, router: ObservedRouter):
        self._router = router

    def get_replay_topk(
        self, scores_tE: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        router = self._router
        scores_tk, chosen_tk = choose(scores_tE, topk, num_groups, group_topk)
        if router.observer is None:
            return scores_tk, chosen_tk
        replayed_tk = router.observer.replayed_choice(router.layer_number - 1, router.notes_tC, chosen_tk)
        return (scores_tk, chosen_tk) if replayed_tk is None else (scores_tE.gather(1, replayed_tk), replayed_tk)


def attach_routing_notes(
    layer: MoELayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give an MoE layer's router the routing notes [R, T, C] of its tokens, before the forward pass. The notes arrive as the
    `padding_mask` argument: Megatron keeps a padding mask with its tokens everywhere, even where layers are recomputed while
    other micro-batches are in flight."""
    notes = kwargs.pop("padding_mask", None)
    if notes is not None:
        layer.router.notes_tC = notes.transpose(0, 1).flatten(0, 1)
    return args, kwargs


class Experts(MegatronModule):
    """Experts of a layer on this rank. Their [gate; up] and down projections are stacked in two matrices, one expert below
    the other. On a GPU each matrix is one grouped product; elsewhere experts are computed one after another."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: Any = None, pg_collection: Any = None):  # noqa: ARG002
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self._expert_group, self._tensor_group, self._data_group = (
            pg_collection.ep,
            pg_collection.expt_tp,
            pg_collection.expt_dp,
        )
        features = config.moe_ffn_hidden_size // self._tensor_group.size()
        self.linear_fc1 = self._weight(num_local_experts * 2 * features, config.hidden_size, split=0)
        self.linear_fc2 = self._weight(num_local_experts * config.hidden_size, features, split=1)

    def forward(self, hidden_NH: Tensor, tokens_per_expert: Tensor, probabilities_N: Tensor) -> tuple[Tensor, None]:
        up_E, down_E = (w.unflatten(0, (self.num_local_experts, -1)) for w in (self.linear_fc1, self.linear_fc2))
        if hidden_NH.is_cuda and hidden_NH.dtype is torch.bfloat16 and len(hidden_NH):
            ends = tokens_per_expert.to(hidden_NH.device, non_blocking=True).cumsum(0, dtype=torch.int32)
            inside_NI = _gated(torch._grouped_mm(hidden_NH, up_E.transpose(1, 2), offs=ends), probabilities_N)
            return torch._grouped_mm(inside_NI, down_E.transpose(1, 2), offs=ends), None
        sizes = tokens_per_expert.tolist()
        parts = zip(hidden_NH.split(sizes), probabilities_N.split(sizes), up_E, down_E, strict=True)
        return torch.cat([_gated(x @ up.T, p) @ down.T for x, p, up, down in parts]), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Any = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Describe the slices under the names that separate expert modules would have. Gate and up are sharded
        separately."""
        described: dict[str, Any] = {}
        ranks, rank, axes = self._tensor_group.size(), self._tensor_group.rank(), len(sharded_offsets) + 1
        first = self._expert_group.rank() * self.num_local_experts

        def describe(name: str, part: str, data: Tensor, expert: int, split: tuple[int, int, int]) -> None:
            axis, place, count = split
            described[f"{prefix}{name}.{expert}.{part}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name}.weight",
                data,
                *sharded_offsets,
                (axes - 1, first + expert, self._expert_group.size() * self.num_local_experts),
                (axes + axis, place, count),
                replica_id=(0, 0, self._data_group.rank()),
                prepend_axis_num=axes,
            )

        for expert, matrix in enumerate(self.linear_fc1.detach().chunk(self.num_local_experts)):
            gate, up = matrix.chunk(2)
            describe("linear_fc1", "gate", gate, expert, (0, rank, 2 * ranks))
            describe("linear_fc1", "up", up, expert, (0, ranks + rank, 2 * ranks))
        for expert, matrix in enumerate(self.linear_fc2.detach().chunk(self.num_local_experts)):
            describe("linear_fc2", "down", matrix, expert, (1, rank, ranks))
        return described

    def _weight(self, rows: int, columns: int, split: int) -> nn.Parameter:
        config = self.config
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))
        config.init_method(weight)
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=split, stride=1)
        # Experts have data-parallel groups of their own, even where each rank has all experts.
        weight.allreduce = False  # type: ignore[attr-defined]
        return weight


def _gated(gate_and_up: Tensor, probabilities_N: Tensor) -> Tensor:
    """Inputs of the down projections: SwiGLU, weighted by the router's probabilities. Only the arguments are kept for the
    backward pass."""
    return weighted_bias_swiglu_impl(gate_and_up, None, probabilities_N[:, None])
