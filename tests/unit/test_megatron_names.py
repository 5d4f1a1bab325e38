"""Mapping between Megatron's tensors and those of Hugging Face checkpoints, whatever slices of them a rank holds.

tests/contracts/test_megatron_weights.py compares logits, which shows that the mapping is that of Megatron's arithmetic."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from roll_core.errors import RollError
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.models.megatron_names import MegatronNames
from roll_core.models.tensor_files import TensorFiles, TensorsInMemory, WriterRank, write_tensors
from roll_core.weights.shards import Shard, TensorGatherer, TensorSlice, load_shards

SIZES = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
}
MIXTURE = SIZES | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
QWEN3 = Qwen3Config(**SIZES, tie_word_embeddings=False)
CONFIGS = {
    "qwen3": QWEN3,
    "qwen3 tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**MIXTURE),
    "qwen3_moe with a dense layer": Qwen3MoeConfig(**MIXTURE, mlp_only_layers=[1]),
    "llama": LlamaConfig(**SIZES),
}
QKV, FC1, EMBEDDING = (
    "decoder.layers.self_attention.linear_qkv.weight",
    "decoder.layers.mlp.linear_fc1.weight",
    "embedding.word_embeddings.weight",
)


def checkpoint(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Tensors of a model with random weights, by their names in a checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return {name: tensor.detach().clone() for name, tensor in to_checkpoint_names(model.named_parameters())}


def shard(
    key: str, index: tuple[int, ...], global_shape: tuple[int, ...], rows: range, columns: range | None = None
) -> Shard:
    """Shard whose parameter is one slice of a Megatron tensor, filled with NaN."""
    start, shape = [rows.start], [len(rows)]
    if len(global_shape) > 1:
        columns = columns or range(global_shape[1])
        start, shape = [*start, columns.start], [*shape, len(columns)]
    parameter = nn.Parameter(torch.full(shape, float("nan")))
    return Shard(TensorSlice(key, index, global_shape, tuple(start), tuple(shape)), parameter, first_row=0, is_main=True)


def load_into(config: PretrainedConfig, tensors: dict[str, torch.Tensor], *shards: Shard) -> list[torch.Tensor]:
    """Load the shards from checkpoint tensors; return the values of their parameters."""
    load_shards(shards, MegatronNames(config), TensorsInMemory(tensors))
    return [each.parameter.data for each in shards]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_names_are_those_of_the_model_in_its_order(config):
    assert list(MegatronNames(config).checkpoint_names) == list(checkpoint(config))


def test_the_queries_of_a_key_head_come_before_its_keys_and_values():
    tensors = checkpoint(QWEN3)
    q, k, v = (tensors[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "qkv")
    (whole,) = load_into(QWEN3, tensors, shard(QKV, (1,), (16, 8), range(16)))
    assert torch.equal(whole, torch.cat([q[0:4], k[0:2], v[0:2], q[4:8], k[2:4], v[2:4]]))


def test_the_gate_projection_comes_before_the_up_projection():
    tensors = checkpoint(QWEN3)
    gate, up = (tensors[f"model.layers.0.mlp.{each}_proj.weight"] for each in ("gate", "up"))
    (whole,) = load_into(QWEN3, tensors, shard(FC1, (0,), (12, 8), range(12)))
    assert torch.equal(whole, torch.cat([gate, up]))


def test_an_expert_is_found_by_layer_and_number_also_where_keys_carry_the_layer():
    config = CONFIGS["qwen3_moe"]
    tensors, down = checkpoint(config), "mlp.experts.experts.linear_fc2.weight"
    wanted = tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    for key, index in ((f"decoder.layers.{down}", (1, 2)), (f"decoder.layers.1.{down}", (2,))):
        assert torch.equal(load_into(config, tensors, shard(key, index, (8, 4), range(8)))[0], wanted)


def test_slices_equal_those_of_the_whole_tensor_even_across_its_source_tensors():
    tensors = checkpoint(QWEN3)
    (whole,) = load_into(QWEN3, tensors, shard(QKV, (0,), (16, 8), range(16)))
    for rows, columns in ((range(3, 11), range(8)), (range(7, 8), range(2, 5)), (range(0, 16), range(4, 8))):
        (part,) = load_into(QWEN3, tensors, shard(QKV, (0,), (16, 8), rows, columns))
        assert torch.equal(part, whole[rows.start : rows.stop, columns.start : columns.stop])


def test_the_padding_of_a_vocabulary_is_zero_and_is_cut_off_when_gathered():
    tensors = checkpoint(QWEN3)
    halves = [shard(EMBEDDING, (), (16, 8), rows) for rows in (range(8), range(8, 16))]
    lower, upper = load_into(QWEN3, tensors, *halves)
    assert torch.equal(torch.cat([lower, upper[:2]]), tensors["model.embed_tokens.weight"])
    assert not upper[2:].any()
    ((name, whole),) = TensorGatherer(halves, MegatronNames(QWEN3)).tensors(lambda parameter: parameter.data, torch.float32)
    assert (name, whole.shape) == ("model.embed_tokens.weight", (10, 8))
    assert torch.equal(whole, tensors[name])


@pytest.mark.parametrize("bucket_bytes", [1, 500, 10**6])
def test_gathered_tensors_equal_those_loaded_whatever_the_size_of_buckets(bucket_bytes):
    tensors = checkpoint(QWEN3)
    shards = [
        *(shard(QKV, (1,), (16, 8), rows) for rows in (range(8, 16), range(8))),
        *(shard(FC1, (0,), (12, 8), rows) for rows in (range(0, 3), range(6, 9), range(3, 6), range(9, 12))),
        shard("decoder.final_layernorm.weight", (), (8,), range(8)),
    ]
    load_into(QWEN3, tensors, *shards)
    gathered = list(
        TensorGatherer(shards, MegatronNames(QWEN3), bucket_bytes).tensors(lambda each: each.data, torch.float32)
    )
    assert [name for name, _ in gathered] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        *(f"model.layers.1.self_attn.{each}_proj.weight" for each in "qkv"),
        "model.norm.weight",
    ]
    for name, tensor in gathered:
        assert torch.equal(tensor, tensors[name]), name


def test_a_slice_that_no_rank_holds_is_noticed_before_anything_is_gathered():
    with pytest.raises(AssertionError, match="has 96 numbers, of which ranks hold 48"):
        TensorGatherer([shard(FC1, (0,), (12, 8), range(6))], MegatronNames(QWEN3))


def test_swapped_gate_and_up_projections_give_another_tensor():
    tensors = checkpoint(QWEN3)
    (right,) = load_into(QWEN3, tensors, shard(FC1, (0,), (12, 8), range(12)))
    gate, up = (f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up"))
    (swapped,) = load_into(QWEN3, tensors | {gate: tensors[up], up: tensors[gate]}, shard(FC1, (0,), (12, 8), range(12)))
    assert not torch.equal(right, swapped)
    assert torch.equal(right, swapped.roll(6, 0))


def test_shards_are_loaded_from_files_as_from_tensors_in_memory(tmp_path):
    tensors = checkpoint(QWEN3)
    write_tensors(tensors.items(), tmp_path / "cut", shard_bytes=600)
    (tmp_path / "one").mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 3
    for folder in ("cut", "one"):
        shards = [shard(QKV, (1,), (16, 8), range(3, 11), range(1, 7)), shard(EMBEDDING, (), (10, 8), range(10))]
        load_shards(shards, MegatronNames(QWEN3), TensorFiles(tmp_path / folder))
        in_memory = [shard(QKV, (1,), (16, 8), range(3, 11), range(1, 7)), shard(EMBEDDING, (), (10, 8), range(10))]
        for ours, theirs in zip(shards, load_into(QWEN3, tensors, *in_memory), strict=True):
            assert torch.equal(ours.parameter.data, theirs)


def test_several_writer_ranks_write_the_same_files_as_a_single_one(tmp_path):
    tensors = checkpoint(QWEN3)
    write_tensors(tensors.items(), tmp_path / "alone", shard_bytes=600)
    for number in (2, 0, 1):
        write_tensors(tensors.items(), tmp_path / "together", shard_bytes=600, writer=WriterRank(number, 3))
    alone, together = (
        {file.name: file.read_bytes() for file in (tmp_path / each).iterdir()} for each in ("alone", "together")
    )
    assert together == alone
    assert "model.safetensors.index.json" in alone


def test_a_folder_of_another_model_is_refused_with_the_name_of_a_tensor(tmp_path):
    tensors, one = checkpoint(QWEN3), shard(FC1, (0,), (12, 8), range(12))
    gate = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(RollError, match=r"model.path: megatron has no place for model.layers.0.self_attn.q_proj.bias"):
        load_into(QWEN3, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(8)}, one)
    with pytest.raises(RollError, match=r"model.path: model.norm.weight is not there"):
        load_into(QWEN3, {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, one)
    with pytest.raises(RollError, match=r"gate_proj.weight is \[5, 8\], and by the model's config \[6, 8\]"):
        load_into(QWEN3, tensors | {gate: tensors[gate][:5]}, one)
    with pytest.raises(RollError, match="has neither model.safetensors.index.json nor model.safetensors"):
        TensorFiles(Path(tmp_path))


def test_a_tied_model_accepts_a_checkpoint_with_an_output_layer():
    tied = CONFIGS["qwen3 tied"]
    tensors = checkpoint(tied)
    assert "lm_head.weight" not in tensors
    load_into(tied, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, shard(FC1, (0,), (12, 8), range(12)))


def test_an_unknown_model_or_tensor_is_refused_by_name():
    with pytest.raises(RollError, match="training.backend megatron knows qwen3, qwen3_moe, llama, and this is gpt2"):
        MegatronNames(GPT2Config())
    with pytest.raises(RollError, match="megatron has a tensor decoder.layers.mlp.router.expert_bias, for which qwen3"):
        load_into(QWEN3, checkpoint(QWEN3), shard("decoder.layers.mlp.router.expert_bias", (0,), (4,), range(4)))
