"""Sizes of models, and what of a GPU they take."""

import json

import pytest
import torch

from roll_core.config.load import load_config
from roll_core.config.model import Architecture, PretrainedModel, ScratchModel
from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.models.causal_lm import build_model
from roll_core.planning.memory import check_memory, gpu_memory, trainer_memory
from roll_core.planning.model_shape import ModelShape, shape_of

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
    overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    return load_config("configs/runs/smollm2-math-gpu.yaml", ["inference.kind=vllm", *overrides])


@pytest.mark.parametrize("architecture", list(Architecture))
def test_weights_are_counted_as_the_model_has_them(architecture):
    model = ScratchModel(architecture=architecture, hidden_size=96, num_heads=4, num_kv_heads=2, num_layers=3)
    shape = shape_of(model)
    assert shape is not None
    with torch.device("meta"):
        built = build_model(model, seed=0)
    assert shape.num_parameters == sum(parameter.numel() for parameter in built.parameters())


def test_a_folder_says_what_model_it_holds(tmp_path):
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
    assert QWEN3_0_6B.num_parameters == 596_049_920


def test_a_trainer_keeps_sixteen_bytes_a_weight_and_what_the_backward_pass_reads():
    memory = trainer_memory(on_one_gpu(training__micro_batch_tokens=16384), QWEN3_0_6B)
    assert memory.weights == pytest.approx(4 * 0.596, rel=1e-3)
    assert memory.kept + memory.gradients == pytest.approx(16 * 0.596, rel=1e-3)
    # a token and layer: 6 x 1024 beside, 2048 + 1024, 2048 + 2 x 1024 and 2048 of attention, 3 x 3072, in bfloat16
    assert memory.activations == pytest.approx(16384 * 28 * 2 * 24_576 / 1e9)


def test_recomputing_keeps_what_each_layer_was_given_and_all_of_one():
    plain = trainer_memory(on_one_gpu(), QWEN3_0_6B).activations
    recomputed = trainer_memory(on_one_gpu(training__activation_checkpointing=True), QWEN3_0_6B).activations
    assert recomputed == pytest.approx(plain / 28 + 65536 * 28 * 1024 * 2 / 1e9)


def test_offloading_leaves_the_engine_the_gpu():
    config = on_one_gpu(inference__memory_share=0.9, training__micro_batch_tokens=2048)
    kept = trainer_memory(config, QWEN3_0_6B).kept
    stays = gpu_memory(config, QWEN3_0_6B, 80.0)
    offloads = gpu_memory(
        on_one_gpu(inference__memory_share=0.9, training__micro_batch_tokens=2048, training__offload=True), QWEN3_0_6B, 80.0
    )
    assert stays.generating - offloads.generating == pytest.approx(kept)
    assert stays.updating == offloads.updating


@pytest.mark.parametrize(
    ("changes", "device_gb", "told"),
    [
        ({}, 80.0, r"training: an update needs about 104 GB of a GPU that has 80: lower training.micro_batch_tokens"),
        (
            {"training__micro_batch_tokens": 4096, "inference__memory_share": 0.95},
            80.0,
            r"lower inference.memory_share to 0.90",
        ),
        ({"training__micro_batch_tokens": 4096}, 9.0, r"give placement.trainer more devices"),
    ],
)
def test_what_cannot_fit_is_refused_by_its_key(changes, device_gb, told):
    with pytest.raises(UserError, match=told):
        check_memory(on_one_gpu(**changes), QWEN3_0_6B, device_gb)


def test_what_is_advised_fits():
    with pytest.raises(UserError) as refused:
        check_memory(on_one_gpu(inference__memory_share=0.5), QWEN3_0_6B, 80.0)
    advised = int(str(refused.value).split(" to ")[1].split(",")[0])
    check_memory(on_one_gpu(inference__memory_share=0.5, training__micro_batch_tokens=advised), QWEN3_0_6B, 80.0)
