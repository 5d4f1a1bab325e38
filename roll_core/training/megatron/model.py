"""Megatron GPT models built from Hugging Face configs: Qwen3, Qwen3-MoE and Llama, with tied embeddings or not.

Shapes: R rows, T tokens of a row on this rank, F frequencies.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

from roll_core.config.model import Architecture
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import Precision, TrainingConfig
from roll_core.errors import UserError
from roll_core.models.megatron_names import architecture_of
from roll_core.training.megatron.layers import attach_routing_notes, block_spec

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of Llama 3 rope scaling that Megatron hard-codes; models with other values are refused."""


class PolicyModel(GPTModel):
    """GPT model that returns the last hidden states instead of logits; `pipeline.py` computes logits chunk by chunk.
    Positions are taken as given, since a row holds several sequences, and completions that continue one prompt."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, MoELayer):
                module.register_forward_pre_hook(attach_routing_notes, with_kwargs=True)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, padding_mask: Tensor | None, **_: Any) -> tuple[Any, ...]:
        """Embed the tokens and compute rotary angles from the given positions."""
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        frequencies_F = self.rotary_pos_emb.inv_freq.to(position_ids.device)
        angles_TRF = position_ids.T[..., None].float() * frequencies_F
        rotary = torch.cat([angles_TRF, angles_TRF], dim=-1)[:, :, None, :]
        return embedded, rotary, None, None, None, padding_mask

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Skip the output layer."""
        return hidden_states

    @property
    def output_weight(self) -> Tensor:
        """Rows of the output layer on this rank."""
        return (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )


def build_chunks(hugging_face: PretrainedConfig, training: TrainingConfig, device: torch.device) -> list[PolicyModel]:
    """Build this rank's pipeline chunks, usually one, with random weights."""
    config = transformer_config(hugging_face, training, device)
    num_chunks = training.layout.virtual_pipeline
    return [
        _build_chunk(config, hugging_face, training.layout, number if num_chunks > 1 else None)
        for number in range(num_chunks)
    ]


def _build_chunk(
    config: TransformerConfig, hugging_face: PretrainedConfig, layout: LayoutConfig, number: int | None
) -> PolicyModel:
    return PolicyModel(
        config,
        block_spec(config, number),
        vocab_size=-(-hugging_face.vocab_size // layout.tensor) * layout.tensor,
        max_sequence_length=hugging_face.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        share_embeddings_and_output_weights=hugging_face.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=number,
        **_rope_settings(hugging_face),
    )


def transformer_config(hugging_face: PretrainedConfig, training: TrainingConfig, device: torch.device) -> TransformerConfig:
    """Translate a Hugging Face config and a training config into Megatron's."""
    layout = training.layout
    dtype = torch.bfloat16 if training.precision is Precision.BFLOAT16 else torch.float32
    on_gpu = device.type == "cuda"
    has_experts = architecture_of(hugging_face) is Architecture.QWEN3_MOE  # by the model: frozen policies may have none
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        **_model_settings(hugging_face),
        **(_moe_settings(hugging_face, layout) if has_experts else {}),
        **_pipeline_settings(hugging_face.num_hidden_layers, layout),
        **(recomputed if training.activation_checkpointing else {}),
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        context_parallel_size=layout.context,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over ranks: losses have global denominators
        variable_seq_lengths=True,
        # On GPUs the backward pass of Megatron's embedding adds with atomics otherwise. On CPUs it does not.
        deterministic_mode=training.deterministic and on_gpu,
        moe_token_dispatcher_type="alltoall",  # the only one with variable lengths; needed even without experts
        use_cpu_initialization=not on_gpu,
        # Megatron's fusions need apex or Transformer Engine, or are compiled, which helps on a GPU only.
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def _model_settings(hugging_face: PretrainedConfig) -> dict[str, Any]:
    return {
        "num_layers": hugging_face.num_hidden_layers,
        "hidden_size": hugging_face.hidden_size,
        "ffn_hidden_size": hugging_face.intermediate_size,
        "num_attention_heads": hugging_face.num_attention_heads,
        "num_query_groups": hugging_face.num_key_value_heads,
        "kv_channels": hugging_face.head_dim or hugging_face.hidden_size // hugging_face.num_attention_heads,
        "layernorm_epsilon": hugging_face.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": architecture_of(hugging_face) in (Architecture.QWEN3, Architecture.QWEN3_MOE),
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hugging_face.initializer_range,
    }


def _moe_settings(hugging_face: PretrainedConfig, layout: LayoutConfig) -> dict[str, Any]:
    dense = set(hugging_face.mlp_only_layers or ())
    has_experts = [
        number not in dense and (number + 1) % hugging_face.decoder_sparse_step == 0
        for number in range(hugging_face.num_hidden_layers)
    ]
    return {
        "num_moe_experts": hugging_face.num_experts,
        "moe_router_topk": hugging_face.num_experts_per_tok,
        "moe_ffn_hidden_size": hugging_face.moe_intermediate_size,
        "moe_layer_freq": 1 if all(has_experts) else [int(each) for each in has_experts],
        "moe_router_pre_softmax": not hugging_face.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def _pipeline_settings(num_layers: int, layout: LayoutConfig) -> dict[str, Any]:
    """Pipeline split, as in `LayoutConfig.layers_of_chunks`: where layers do not divide evenly, the embedding and the output
    layer count as a layer each."""
    stages: dict[str, Any] = {"pipeline_model_parallel_size": layout.pipeline}
    if layout.virtual_pipeline > 1:
        stages |= {"virtual_pipeline_model_parallel_size": layout.virtual_pipeline, "overlap_p2p_comm": True}
    if layout.pipeline > 1:
        stages["batch_p2p_comm"] = False
    if num_layers % (layout.pipeline * layout.virtual_pipeline):
        stages |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    return stages


def _rope_settings(hugging_face: PretrainedConfig) -> dict[str, Any]:
    rotary = hugging_face.rope_parameters
    match rotary["rope_type"]:
        case "default":
            return {"rotary_base": rotary["rope_theta"]}
        case "llama3" if all(rotary[name] == value for name, value in LLAMA3_SCALING.items()):
            return {"rotary_base": rotary["rope_theta"], "rope_scaling": True, "rope_scaling_factor": rotary["factor"]}
    raise UserError(f"model: training.backend megatron has no positions of this kind ({rotary}): set training.backend=torch")
