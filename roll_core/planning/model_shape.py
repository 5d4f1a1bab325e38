"""Sizes of a model and its number of weights: all that planning needs to know of it."""

from dataclasses import dataclass
from functools import cache

from roll_core.config.model import Architecture, ModelConfig, ModelShape, PretrainedModel, ScratchModel
from roll_core.config.training.lora import LoraConfig, LoraTarget
from roll_core.errors import UserError
from roll_core.models.characters import VOCABULARY
from roll_core.planning.architectures import HfConfig, read_hf_config, why_not_planned


@dataclass(frozen=True)
class Parameters:
    """Number of weights by kind.

    Example, Qwen3-30B-A3B: Parameters(embedding=311_164_928, attention=905_969_664, mlp=0, experts=28_991_029_248,
    router=12_582_912, norms=210_944, head=311_164_928, active_experts=1_811_939_328)
    """

    embedding: int
    attention: int
    mlp: int
    """MLPs of dense layers."""
    experts: int
    """All experts of a mixture of experts."""
    router: int
    norms: int
    head: int
    """Output layer; 0 if it is tied to the embedding."""
    active_experts: int
    """Weights of the experts that one token goes through."""

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.experts + self.router + self.norms + self.head

    @property
    def active(self) -> int:
        """Weights that one token goes through, as in the names of models (3B of Qwen3-30B-A3B)."""
        return self.total - self.experts + self.active_experts


@cache
def parameters_of(shape: ModelShape) -> Parameters:
    """Count the weights of a model."""
    layer = layer_parameters(shape)
    embedding = shape.vocabulary * shape.hidden
    return Parameters(
        embedding=embedding,
        attention=shape.layers * layer.attention,
        mlp=shape.layers * layer.mlp,
        experts=shape.layers * layer.experts,
        router=shape.layers * layer.router,
        norms=shape.layers * layer.norms + shape.hidden,
        head=0 if shape.is_tied else embedding,
        active_experts=shape.layers * layer.active_experts,
    )


@cache
def layer_parameters(shape: ModelShape) -> Parameters:
    """Count the weights of one layer."""
    matrices = 3 * shape.hidden * shape.intermediate  # gate, up and down
    return Parameters(
        embedding=0,
        attention=2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_size,
        mlp=0 if shape.experts else matrices,
        experts=shape.experts * matrices,
        router=shape.experts * shape.hidden,
        norms=2 * shape.hidden + (2 * shape.head_size if shape.has_head_norms else 0),
        head=0,
        active_experts=shape.experts_per_token * matrices if shape.experts else 0,
    )


def lora_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Count the weights that LoRA adds to a model and trains."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    features = {
        LoraTarget.QUERY: hidden + queries,
        LoraTarget.KEY: hidden + keys,
        LoraTarget.VALUE: hidden + keys,
        LoraTarget.OUTPUT: queries + hidden,
    }
    if not shape.experts:
        features |= dict.fromkeys((LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN), hidden + shape.intermediate)
    return shape.layers * lora.rank * sum(features.get(target, 0) for target in lora.targets)


def shape_of(model: ModelConfig) -> ModelShape | None:
    """Read the shape from the model's folder, else from `model.shape`; return None if neither is there, or if the folder's
    model is of an architecture that planning does not know."""
    match model:
        case ScratchModel():
            is_mixture = model.architecture is Architecture.QWEN3_MOE
            return ModelShape(
                hidden=model.hidden_size,
                intermediate=model.intermediate_size,
                layers=model.num_layers,
                heads=model.num_heads,
                kv_heads=model.num_kv_heads,
                head_size=model.hidden_size // model.num_heads,
                vocabulary=len(VOCABULARY),
                is_tied=True,
                has_head_norms=model.architecture is not Architecture.LLAMA,
                experts=model.num_experts if is_mixture else 0,
                experts_per_token=model.experts_per_token if is_mixture else 1,
            )
        case PretrainedModel():
            hf_config = read_hf_config(model)
            if hf_config is None:
                return model.shape
            return None if why_not_planned(hf_config) else _shape_from_hf_config(hf_config, model.path)


def _shape_from_hf_config(hf_config: HfConfig, folder: str) -> ModelShape:
    """Read the shape from a Hugging Face config.json of the Llama or Qwen family."""
    try:
        hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
        # Published configs have "num_experts"; transformers 5 saves "num_local_experts".
        experts = hf_config.get("num_experts", hf_config.get("num_local_experts", 0))
        return ModelShape(
            hidden=hidden,
            intermediate=hf_config["moe_intermediate_size" if experts else "intermediate_size"],
            layers=hf_config["num_hidden_layers"],
            heads=heads,
            kv_heads=hf_config.get("num_key_value_heads") or heads,
            head_size=hf_config.get("head_dim") or hidden // heads,
            vocabulary=hf_config["vocab_size"],
            is_tied=hf_config.get("tie_word_embeddings", False),
            has_head_norms=hf_config["model_type"].startswith("qwen3"),
            experts=experts,
            experts_per_token=hf_config.get("num_experts_per_tok", 1) if experts else 1,
        )
    except KeyError as missing:
        raise UserError(f"model.path: config.json in {folder} has no {missing}: fetch the model again") from None
