"""Architectures that planning does not know: said in one sentence, and refused where the backend cannot train them. The
configs are those of published models, without the keys that planning does not read."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from roll_core.config.load import load_config
from roll_core.config.model import PretrainedModel
from roll_core.errors import UserError
from roll_core.planning.architectures import PLANNED, check_architecture
from roll_core.planning.model_shape import parameters_of, shape_of
from roll_core.planning.preflight import check_experts, check_fits, check_layout, check_lora_targets
from tests.support import ROOT

UNKNOWN: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 151552,
        "tie_word_embeddings": False,
    },
    "Qwen2-57B-A14B": {
        "model_type": "qwen2_moe",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "sliding_window": 65536,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "Gemma-2-9B": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "GPT-OSS-120B": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "sliding_window": 128,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
    },
}
LEFT_OUT = {"Gemma-2-9B": "final_logit_softcapping", "GPT-OSS-120B": "a sliding_window of 128"}
"""Models of which training leaves out a part, and the key that names it."""
QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
MEGATRON = ROOT / "configs/runs/qwen3-moe-30b.yaml"
TORCH = ROOT / "configs/runs/smollm2-math-gpu.yaml"


def saved(folder: Path, described: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)


def settings(folder: Path, described: dict[str, Any]) -> list[str]:
    return [f"model.path={saved(folder, described)}", "model.shape=null", "cluster.device_memory_gib=79"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_megatron_refuses_an_architecture_that_it_does_not_know_in_one_sentence(tmp_path, capsys, name):
    overrides = [word for each in settings(tmp_path, UNKNOWN[name]) for word in ("--set", each)]
    assert cli.main(["plan", str(MEGATRON), *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (sentence,) = printed.err.splitlines()
    assert f"model.path: architecture {UNKNOWN[name]['model_type']} is not known to training.backend megatron" in sentence
    assert "which trains qwen3, qwen3_moe, llama" in sentence


@pytest.mark.parametrize("name", [name for name in UNKNOWN if name not in LEFT_OUT])
def test_a_plan_of_an_unknown_architecture_says_first_that_memory_and_time_are_not_planned(tmp_path, capsys, name):
    overrides = [word for each in settings(tmp_path, UNKNOWN[name]) for word in ("--set", each)]
    assert cli.main(["plan", str(TORCH), *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = f"memory and time: architecture {UNKNOWN[name]['model_type']} is not known (known: {', '.join(PLANNED)})"
    assert lines[0] == "in short"
    assert lines[1].endswith(expected)
    assert not any("fits" in line or "parameters" in line for line in lines)


@pytest.mark.parametrize("name", [name for name in UNKNOWN if name not in LEFT_OUT])
def test_no_check_before_a_run_with_torch_stumbles_over_an_unknown_architecture(tmp_path, name):
    config = load_config(TORCH, settings(tmp_path, UNKNOWN[name]))
    for check in (check_architecture, check_layout, check_experts, check_lora_targets, check_fits):
        check(config)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_model_whose_logits_training_would_get_wrong_is_refused(tmp_path, name):
    config = load_config(TORCH, settings(tmp_path, UNKNOWN[name]))
    with pytest.raises(UserError, match=rf"model.path: .* has {LEFT_OUT[name]} in config.json, which training leaves out"):
        check_architecture(config)


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ({"n_routed_experts": 8}, "n_routed_experts"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"kv_lora_rank": 64}, "kv_lora_rank"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_layers_of_another_kind_in_a_known_architecture_are_not_planned_as_usual_ones(tmp_path, added, reason):
    assert shape_of(PretrainedModel(path=saved(tmp_path, QWEN2_5_7B))) is not None
    assert shape_of(PretrainedModel(path=saved(tmp_path, QWEN2_5_7B | added))) is None, reason


@pytest.mark.parametrize(
    ("described", "parameters"), [(QWEN2_5_7B, 7_615_616_512), (SMOLLM2_135M, 134_515_008)], ids=["qwen2", "llama"]
)
def test_models_of_known_architectures_have_the_published_number_of_parameters(tmp_path, described, parameters):
    model = PretrainedModel(path=saved(tmp_path, described))
    shape = shape_of(model)
    assert shape is not None
    assert parameters_of(shape).total == pytest.approx(parameters, rel=2e-5)  # the biases of qwen2 are not counted


@pytest.mark.parametrize("model_type", PLANNED)
def test_embeddings_are_tied_by_default_exactly_where_transformers_ties_them(model_type):
    from transformers import AutoConfig

    assert not AutoConfig.for_model(model_type).tie_word_embeddings


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "is not a JSON object"), ('{"model_type": "llama"}', "has no 'hidden_size'")],
)
def test_a_damaged_config_json_is_refused_in_one_sentence(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        shape_of(PretrainedModel(path=str(tmp_path)))
