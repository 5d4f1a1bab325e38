"""Construction of the Hugging Face model that a run's `model` section describes.

A scratch model's weights depend only on the seed. Used by training backends, engines and exports.
"""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

from roll_core.config.model import Architecture, ModelConfig, PretrainedModel, ScratchModel
from roll_core.models import characters
from roll_core.seeds import derive_seed


def build_model(config: ModelConfig, seed: int) -> PreTrainedModel:
    """Build the model in float32 on the CPU, with an attention implementation that takes explicit masks."""
    match config:
        case ScratchModel():
            return _from_scratch(config, seed)
        case PretrainedModel():
            return AutoModelForCausalLM.from_pretrained(
                config.path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            )


def model_config(config: ModelConfig) -> PretrainedConfig:
    """Hugging Face config of the model that a run's `model` section describes."""
    match config:
        case ScratchModel():
            return scratch_config(config)
        case PretrainedModel():
            return AutoConfig.from_pretrained(config.path, local_files_only=True)


def scratch_config(config: ScratchModel) -> PretrainedConfig:
    """Hugging Face config of a model that is trained from scratch on the character tokenizer."""
    sizes = {
        "vocab_size": len(characters.VOCABULARY),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        "tie_word_embeddings": True,
        "pad_token_id": characters.PAD,
        "bos_token_id": None,
        "eos_token_id": characters.EOS,
        "attn_implementation": "sdpa",
    }
    match config.architecture:
        case Architecture.QWEN3:
            return Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"])
        case Architecture.QWEN3_MOE:
            return Qwen3MoeConfig(
                **sizes,
                architectures=["Qwen3MoeForCausalLM"],
                moe_intermediate_size=config.intermediate_size,
                num_experts=config.num_experts,
                num_experts_per_tok=config.experts_per_token,
                norm_topk_prob=True,
            )
        case Architecture.LLAMA:
            return LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])


def _from_scratch(config: ScratchModel, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model"))
        match config.architecture:
            case Architecture.QWEN3:
                return Qwen3ForCausalLM(scratch_config(config))
            case Architecture.QWEN3_MOE:
                return Qwen3MoeForCausalLM(scratch_config(config))
            case Architecture.LLAMA:
                return LlamaForCausalLM(scratch_config(config))


def routers_of(model: PreTrainedModel) -> dict[int, Qwen3MoeTopKRouter]:
    """Expert routers of a mixture-of-experts model by layer number; empty for a dense model."""
    layers = enumerate(model.base_model.layers)
    return {number: layer.mlp.gate for number, layer in layers if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)}
