"""Memory plan: parameters of models, memory of trainers and engines on a GPU, and configs that do not fit."""

import json

import pytest
import torch

from roll_core.config.inference import VllmInference
from roll_core.config.load import load_config
from roll_core.config.model import Architecture, ModelShape, PretrainedModel, ScratchModel
from roll_core.config.run import RunConfig
from roll_core.config.training.training import Precision, TrainingConfig
from roll_core.errors import UserError
from roll_core.models.causal_lm import build_model
from roll_core.planning.activations import saved_bytes_per_layer
from roll_core.planning.fits import check_memory
from roll_core.planning.memory import MemoryFit, engine_memory, gpu_memory, judge_memory, trainer_memory
from roll_core.planning.model_shape import parameters_of, shape_of
from roll_core.training.torch.trainable import TorchSettings

QWEN3_0_6B = ModelShape(
    hidden=1024,
    intermediate=3072,
    layers=28,
    heads=16,
    kv_heads=8,
    head_size=128,
    vocabulary=151_936,
    is_tied=True,
    has_head_norms=True,
)


def on_one_gpu(**changes: object) -> RunConfig:
    """Config of trainer and vLLM engine on one GPU. `training__offload` stands for the key training.offload."""
    overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    return load_config("configs/runs/smollm2-math-gpu.yaml", ["inference.kind=vllm", *overrides])


@pytest.mark.parametrize("architecture", list(Architecture))
def test_the_planned_number_of_parameters_is_that_of_the_built_model(architecture):
    model = ScratchModel(architecture=architecture, hidden_size=96, num_heads=4, num_kv_heads=2, num_layers=3)
    shape = shape_of(model)
    assert shape is not None
    with torch.device("meta"):
        built = build_model(model, seed=0)
    assert parameters_of(shape).total == sum(parameter.numel() for parameter in built.parameters())


def test_the_shape_of_a_model_is_read_from_its_folder(tmp_path):
    model = PretrainedModel(path=str(tmp_path))
    assert shape_of(model) is None
    described = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert shape_of(model) == QWEN3_0_6B


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_read_under_the_published_key_and_the_key_of_transformers(tmp_path, key):
    described = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
        key: 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    shape = shape_of(PretrainedModel(path=str(tmp_path), max_positions=64))
    assert shape is not None
    assert parameters_of(shape).experts == 2 * 8 * 3 * 64 * 48
    assert parameters_of(QWEN3_0_6B).total == 596_049_920


def test_a_trainer_keeps_sixteen_bytes_a_weight_and_the_activations():
    config = on_one_gpu(training__micro_batch_tokens=16384)
    assert config.training.compile
    memory = trainer_memory(config, QWEN3_0_6B)
    assert memory.weights == pytest.approx(4 * 0.596, rel=1e-3)
    assert memory.resident_gb + memory.gradients == pytest.approx(16 * 0.596, rel=1e-3)
    # Elements per token and layer. In bfloat16: 4 x 1024 before and after norms, 2048 + 1024 and 4 x 2048 of attention, a
    # row of 2048 of the mask, 3 x 3072 of the MLP. In float32: 2 + 16 + 8 + 16 of norms and softmax.
    assert memory.activations == pytest.approx(16384 * 28 * (2 * 26_624 + 4 * 42) / 1e9)


def test_activation_checkpointing_keeps_the_input_of_each_layer_and_all_activations_of_one():
    plain = trainer_memory(on_one_gpu(), QWEN3_0_6B).activations
    recomputed = trainer_memory(on_one_gpu(training__activation_checkpointing=True), QWEN3_0_6B).activations
    assert recomputed == pytest.approx(plain / 28 + 65536 * 28 * 1024 * 2 / 1e9)


@pytest.mark.parametrize("architecture", list(Architecture))
def test_the_planned_activations_of_a_layer_are_those_that_autograd_saves(architecture):
    """Compare the tensors that torch saves for the backward pass of a layer with the planned terms."""
    three, four = (_saved_bytes(_small_model(architecture, num_layers)) for num_layers in (3, 4))
    model = _small_model(architecture, 4)
    shape = shape_of(model)
    assert shape is not None
    changes = {"model": model, "training": BFLOAT16, "rollout": {"max_new_tokens": 1}}
    planned = saved_bytes_per_layer(RunConfig.model_validate({"name": "small", "iterations": 1, **changes}), shape)
    parameters = parameters_of(shape)
    copies = 2 * (parameters.attention + parameters.mlp + parameters.router) / shape.layers
    assert NUM_TOKENS * planned + copies == pytest.approx(four - three, rel=0.02)


BFLOAT16 = TrainingConfig(precision=Precision.BFLOAT16, micro_batch_tokens=512)
NUM_TOKENS, ROW = 512, 128


def _small_model(architecture: Architecture, num_layers: int) -> ScratchModel:
    return ScratchModel(
        architecture=architecture,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=320,
        num_layers=num_layers,
        max_positions=ROW,
        num_experts=8,
        experts_per_token=3,
    )


def _saved_bytes(model: ScratchModel) -> int:
    """Bytes that autograd saves in the forward pass of four sequences, without the weights."""
    built = TorchSettings(BFLOAT16, seed=0, temperature=1.0, device=torch.device("cpu")).build_model(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    saved: dict[int, torch.Tensor] = {}  # references keep an address from being used twice

    def record(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            saved[address] = tensor
        return tensor

    may_attend = torch.ones(ROW, ROW, dtype=torch.bool).tril().expand(NUM_TOKENS // ROW, 1, ROW, ROW)
    embedded = torch.randn(NUM_TOKENS // ROW, ROW, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        hidden_states = built.base_model(
            inputs_embeds=embedded, attention_mask=may_attend, use_cache=False
        ).last_hidden_state
    assert hidden_states.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


QWEN3_1_7B_IN_CHARACTERS = ScratchModel(
    hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, num_kv_heads=8, max_positions=320
)


@pytest.mark.parametrize(("compiled", "measured"), [(True, 58.4), (False, 80.9)])
def test_planned_peaks_are_within_a_tenth_of_measured_ones(compiled, measured):
    """Measured on one H200 with 51 rows of 320 tokens: docs/benchmarks/gpu.md."""
    training = BFLOAT16.model_copy(update={"compile": compiled, "micro_batch_tokens": 16_320})
    config = RunConfig(name="parts", iterations=1, model=QWEN3_1_7B_IN_CHARACTERS, training=training)
    shape = shape_of(config.model)
    assert shape is not None
    assert trainer_memory(config, shape).peak == pytest.approx(measured, rel=0.1)


def test_the_planned_output_layer_of_a_real_vocabulary_is_within_a_tenth_of_the_measured_one():
    """Measured on one H200: 3.1 GB for 1,024 positions at a time, 151,936 tokens, 1,024 features (docs/benchmarks.md)."""
    assert trainer_memory(on_one_gpu(), QWEN3_0_6B).logits == pytest.approx(3.1, rel=0.1)


def test_ranks_that_share_a_model_gather_two_layers_at_a_time():
    config = load_config("configs/runs/qwen3-moe-30b.yaml", ["training.backend=torch", "training.layout={}"])
    shape = shape_of(config.model)
    assert shape is not None
    memory = trainer_memory(config, shape)
    assert memory.weights == pytest.approx(4 * 30.532 / 32, rel=1e-3)
    # 0.6230 billion weights a layer, 0.6223 in embedding and output layer: 2 bytes of all three, 6 of one; 1 GB for NCCL
    assert memory.buffers == pytest.approx(2 * (2 * 0.6230 + 0.6223) + 6 * 0.6230 + 1.0, rel=1e-3)


def test_an_engine_uses_the_memory_that_weights_leave_for_its_kv_cache():
    engine = engine_memory(VllmInference(tensor_parallel=2, memory_share=0.5), QWEN3_0_6B, 80.0)
    assert engine.weights == pytest.approx(0.596, rel=1e-3)
    assert engine.cache == pytest.approx(40 - 0.596 - 3.0, rel=1e-3)
    # 28 layers x keys and values x 8 heads x 128 x 2 bytes, half of them on each GPU
    assert engine.cached_tokens == int(engine.cache * 1e9 / (28 * 2 * 8 * 128 * 2 / 2))


def test_offload_frees_the_trainers_memory_while_the_engine_generates():
    config = on_one_gpu(inference__memory_share=0.9, training__micro_batch_tokens=2048)
    resident_gb = trainer_memory(config, QWEN3_0_6B).resident_gb
    stays = gpu_memory(config, QWEN3_0_6B, 80.0)
    offloads = gpu_memory(
        on_one_gpu(inference__memory_share=0.9, training__micro_batch_tokens=2048, training__offload=True), QWEN3_0_6B, 80.0
    )
    assert stays.generating - offloads.generating == pytest.approx(resident_gb)
    assert stays.updating == offloads.updating


@pytest.mark.parametrize(
    ("changes", "device_gb", "message"),
    [
        (
            {},
            80.0,
            r"training: an update needs about 114 GB of a GPU that has 80, 34.0 too many: lower training.micro_batch_tokens",
        ),
        (
            {"training__micro_batch_tokens": 4096, "inference__memory_share": 0.95},
            80.0,
            r"set training.offload=true, or lower inference.memory_share to 0.80$",
        ),
        ({"training__micro_batch_tokens": 4096}, 9.0, r"give placement.trainer more devices"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_its_key(changes, device_gb, message):
    with pytest.raises(UserError, match=message):
        check_memory(on_one_gpu(**changes), QWEN3_0_6B, device_gb)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.900001, 1.0, 1.000001])
def test_one_function_judges_memory_with_a_margin(share):
    expected = MemoryFit.FITS if share <= 0.9 else MemoryFit.TIGHT if share <= 1.0 else MemoryFit.DOES_NOT_FIT
    assert judge_memory(share * 80.0, 80.0) is expected


def test_advice_that_was_tried_and_failed_is_not_given():
    # 596 M weights x 16 bytes are more than 9 GB: neither a smaller micro-batch nor recomputation can help
    with pytest.raises(UserError) as refused:
        check_memory(on_one_gpu(training__micro_batch_tokens=4096), QWEN3_0_6B, 9.0)
    assert "activation_checkpointing" not in str(refused.value)
    assert "micro_batch_tokens" not in str(refused.value)
    # the trainer is offloaded already: that cannot be advised once more
    offloaded = on_one_gpu(inference__memory_share=0.995, training__micro_batch_tokens=4096, training__offload=True)
    with pytest.raises(UserError, match=r"tokens are generated: lower inference.memory_share to 0.89$"):
        check_memory(offloaded, QWEN3_0_6B, 80.0)


def test_the_advised_micro_batch_fits():
    with pytest.raises(UserError) as refused:
        check_memory(on_one_gpu(inference__memory_share=0.5), QWEN3_0_6B, 80.0)
    advised = int(str(refused.value).split(" to ")[1].split(",")[0])
    check_memory(on_one_gpu(inference__memory_share=0.5, training__micro_batch_tokens=advised), QWEN3_0_6B, 80.0)
