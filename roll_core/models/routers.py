"""The routers of a Hugging Face mixture: which expert every token goes to."""

from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter


def routers_of(model: PreTrainedModel) -> dict[int, Qwen3MoeTopKRouter]:
    """By the number of their layer; a dense model has none."""
    layers = enumerate(model.base_model.layers)
    return {number: layer.mlp.gate for number, layer in layers if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)}
