"""Conversion between Hugging Face folders and Megatron's models, under several layouts.

A folder that is read and written back is equal to the bit, and Megatron computes the hidden states of Hugging Face.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from roll_core.config.model import Architecture
from roll_core.config.training.layout import LayoutConfig as Layout
from roll_core.config.training.training import TrainingConfig
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.models.megatron_names import LAYERS, MegatronNames, RowMapping
from roll_core.models.tensor_files import TensorFiles, WriterRank, write_tensors
from roll_core.weights.shards import TensorGatherer, load_shards

SIZES = {
    "vocab_size": 51,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
MIXTURE = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3-moe": Qwen3MoeConfig(**MIXTURE, tie_word_embeddings=False),
    "qwen3-moe-with-dense-layers": Qwen3MoeConfig(**MIXTURE, mlp_only_layers=[0, 3]),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
}
# Layouts by the number of ranks.
WORLDS = {
    1: (Layout(),),
    2: (Layout(tensor=2), Layout(pipeline=2, virtual_pipeline=2), Layout(expert=2)),
    4: (Layout(tensor=2, pipeline=2), Layout(tensor=2, expert=2, expert_tensor=2), Layout(expert=4), Layout(tensor=2)),
}
SMALL_SHARD, SMALL_BUCKET = 20_000, 5_000
FC1 = "mlp.linear_fc1.weight"


def _cases(num_ranks: int) -> list[tuple[str, Layout, str]]:
    """Cases of a world: model, layout, and name of the folder that is written."""
    return [
        (name, layout, f"{name}, {num_ranks} ranks, {number}")
        for name in MODELS
        for number, layout in enumerate(WORLDS[num_ranks])
        if layout.expert == 1 or "moe" in name
    ]


class Worlds:
    """Worlds of ranks that read and write all models; each runs when a test first asks for what it wrote."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._done: set[int] = set()
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["roll_core.training.megatron.backend", "tests.contracts.test_megatron_weights"])

    def run(self, num_ranks: int) -> None:
        """Run a world, unless it has run already."""
        if num_ranks not in self._done:
            mp.start_processes(_in_rank, (num_ranks, self._folder), nprocs=num_ranks, start_method="forkserver")
            self._done.add(num_ranks)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folder with all models and their hidden states by Hugging Face; worlds write beside them."""
    folder = tmp_path_factory.mktemp("weights")
    for name, config in MODELS.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5)  # norms of all ones could be swapped without notice
        config.save_pretrained(folder / name)
        write_tensors(to_checkpoint_names(model.named_parameters()), folder / name, SMALL_SHARD)
        torch.save(_hidden_states(model), folder / f"{name}.hidden")
    return folder


@pytest.fixture(scope="module")
def worlds(models) -> Worlds:
    return Worlds(models)


@pytest.fixture
def by_one_rank(models, worlds) -> Path:
    """Folder with all models and what a world of one rank wrote and computed."""
    worlds.run(1)
    return models


def _token_ids() -> Tensor:
    return torch.randint(0, 51, (2, 9), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def _hidden_states(model: Any) -> Tensor:
    return model.base_model(_token_ids()).last_hidden_state


def _in_rank(rank: int, num_ranks: int, folder: Path) -> None:
    from roll_core.training.megatron.cpu import on_device

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    with on_device():
        for name, layout, to in _cases(num_ranks):
            _read_and_write(folder, name, layout, to)
        if num_ranks == 1:
            for architecture in Architecture:
                LAYERS[architecture][FC1] = RowMapping(("mlp.up_proj.weight", "mlp.gate_proj.weight"))
            for name in MODELS:
                _read_and_write(folder, name, Layout(), f"{name}, swapped")
    dist.destroy_process_group()


@torch.no_grad()
def _read_and_write(folder: Path, name: str, layout: Layout, to: str) -> None:
    """Read a folder into Megatron's model and write it to another, in one rank; with one rank, save hidden states too."""
    from roll_core.training.megatron.model import build_chunks
    from roll_core.training.megatron.shards import shards_of
    from roll_core.training.megatron.world import initialize_layout

    config, device = AutoConfig.from_pretrained(folder / name), torch.device("cpu")
    initialize_layout(layout, device, seed=0)
    chunks = build_chunks(config, TrainingConfig(backend="megatron", layout=layout), device)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.fill_(float("nan"))
    shards, names = shards_of(chunks), MegatronNames(config)
    load_shards(shards, names, TensorFiles(folder / name))
    weights = TensorGatherer(shards, names, SMALL_BUCKET).tensors(lambda parameter: parameter.data, torch.float32)
    write_tensors(weights, folder / to, SMALL_SHARD, WriterRank(dist.get_rank(), dist.get_world_size()))
    dist.barrier()
    if dist.get_world_size() == 1:
        token_ids = _token_ids()
        hidden = chunks[0](token_ids, torch.arange(token_ids.shape[1]).expand_as(token_ids), None)
        torch.save(hidden.transpose(0, 1), folder / f"{to}.hidden")


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "config.json"}


def _case_parameters() -> list[Any]:
    """Parameters (num_ranks, name, to) of a test; the world of four ranks is left to `make test-all`."""
    return [
        pytest.param(num_ranks, name, to, id=to, marks=[pytest.mark.exhaustive] if num_ranks == 4 else [])
        for num_ranks in WORLDS
        for name, _, to in _cases(num_ranks)
    ]


@pytest.mark.parametrize(("num_ranks", "name", "to"), _case_parameters())
def test_a_folder_is_written_back_to_the_bit_under_every_layout(num_ranks, name, to, models, worlds):
    worlds.run(num_ranks)
    before, after = _files(models / name), _files(models / to)
    assert len(before) > 4
    assert after == before


@pytest.mark.parametrize("name", MODELS)
def test_megatron_computes_the_hidden_states_of_hugging_face(name, by_one_rank):
    megatron, hugging_face = (torch.load(by_one_rank / f"{of}.hidden") for of in (f"{name}, 1 ranks, 0", name))
    torch.testing.assert_close(megatron, hugging_face, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3-moe"])
def test_swapping_gate_and_up_in_the_name_table_changes_hidden_states_but_not_the_folder(name, by_one_rank):
    before, after = TensorFiles(by_one_rank / name), TensorFiles(by_one_rank / f"{name}, swapped")
    assert set(after.names) == set(before.names)
    assert all(torch.equal(after.read(each, (slice(None),)), before.read(each, (slice(None),))) for each in before.names)
    swapped, hugging_face = (torch.load(by_one_rank / f"{of}.hidden") for of in (f"{name}, swapped", name))
    assert (swapped - hugging_face).abs().max() > 0.1
