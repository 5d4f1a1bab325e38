"""Architectures of pretrained models, judged by config.json alone: whether planning knows their sizes, and whether training
computes what the model defines. `roll plan` and the checks of `roll run` use it."""

import json
from pathlib import Path
from typing import Any

from roll_core.config.model import Architecture, PretrainedModel
from roll_core.config.run import RunConfig
from roll_core.config.training.training import BackendKind
from roll_core.errors import UserError

HfConfig = dict[str, Any]
"""Contents of a Hugging Face config.json."""

PLANNED = (Architecture.LLAMA.value, "qwen2", Architecture.QWEN3.value, Architecture.QWEN3_MOE.value)
"""Values of `model_type` whose sizes `ModelShape` can hold. Biases of qwen2 (0.002 % of its weights) are not counted."""

_OTHER_SIZES = (
    "n_routed_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "mlp_only_layers",
    "kv_lora_rank",
)
"""Keys of layers that `ModelShape` cannot hold: shared experts, dense layers in a mixture, compressed keys and values."""
_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Keys of what a model does to its logits after the output layer. Training takes the output layer's logits as they are."""


def read_hf_config(model: PretrainedModel) -> HfConfig | None:
    """Read config.json in the model's folder; return None if there is none. Raise UserError if it is not a JSON object."""
    path = Path(model.path) / "config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"model.path: {path} is not JSON ({error}): fetch the model again") from None
    if not isinstance(found, dict):
        raise UserError(f"model.path: {path} is not a JSON object: fetch the model again")
    return found


def model_type_of(hf_config: HfConfig) -> str:
    """Hugging Face's name of the architecture. Example: qwen3_moe"""
    return str(hf_config.get("model_type", "without model_type"))


def why_not_planned(hf_config: HfConfig) -> str | None:
    """Reason why memory and time are not planned, for the end of a sentence; None if the model's sizes are known."""
    model_type = model_type_of(hf_config)
    if model_type not in PLANNED:
        return f"architecture {model_type} is not known (known: {', '.join(PLANNED)})"
    other = [key for key in _OTHER_SIZES if hf_config.get(key)]
    if hf_config.get("decoder_sparse_step", 1) != 1:
        other.append("decoder_sparse_step")
    if _other_layers(hf_config):
        other.append("layer_types")
    return f"{other[0]} in config.json gives {model_type} layers of another kind" if other else None


def check_architecture(config: RunConfig) -> None:
    """Raise UserError if the training backend cannot train the model's architecture, or would compute other logits than the
    model defines. Skipped if the model's folder is not on this machine."""
    hf_config = read_hf_config(config.model) if isinstance(config.model, PretrainedModel) else None
    if hf_config is None or config.training.backend is BackendKind.REHEARSAL:
        return
    model_type, known = model_type_of(hf_config), [architecture.value for architecture in Architecture]
    if config.training.backend is BackendKind.MEGATRON and model_type not in known:
        raise UserError(
            f"model.path: architecture {model_type} is not known to training.backend megatron, which trains "
            f"{', '.join(known)}: set training.backend=torch, or take another model"
        )
    if left_out := _left_out(hf_config, config.model.max_positions):
        raise UserError(
            f"model.path: {model_type} has {left_out} in config.json, which training leaves out, so that its logprobs would "
            f"be wrong: take another model; {', '.join(PLANNED)} are known to work"
        )


def _left_out(hf_config: HfConfig, max_positions: int) -> str | None:
    """First key of config.json that the model's own forward pass heeds and ours does not; None if there is none.

    Packed sequences come with masks of their own, in place of sliding windows. Layers that carry a state from token to
    token would carry it from one packed sequence to the next.
    """
    scaled = next((key for key in _SCALED_LOGITS if hf_config.get(key) not in (None, 1, 1.0)), None)
    if scaled is not None:
        return scaled
    others = _other_layers(hf_config)
    if others - {"sliding_attention"}:
        return f"layer_types {', '.join(sorted(others - {'sliding_attention'}))}"
    window = hf_config.get("sliding_window") if hf_config.get("use_sliding_window", True) else None
    return f"a sliding_window of {window}" if window is not None and window < max_positions else None


def _other_layers(hf_config: HfConfig) -> set[str]:
    """Kinds of layers other than those that attend to all earlier tokens."""
    return set(hf_config.get("layer_types") or ()) - {"full_attention"}
