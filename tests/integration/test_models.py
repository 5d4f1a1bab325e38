"""`roll models`: a real model imported from its package is exact, answers a question, and is found by a run."""

import json

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from roll_core.models.packaged import PACKAGED, PackagedModel, packaged_file
from tests.integration.conftest import Workspace

NAME = "smollm2-135m"
FOLDER = f"roll-data/models/{NAME}"


@pytest.fixture(scope="module")
def imported(new_workspace) -> Workspace:
    """Workspace with the imported model, for all tests."""
    workspace = new_workspace("imported")
    printed = workspace.printed("models", "import", NAME)
    assert printed == f"{NAME} is in {FOLDER}: model: {{kind: pretrained, path: {FOLDER}}}\n"
    return workspace


def test_the_folder_holds_what_a_model_needs_and_nothing_about_where_it_came_from(imported):
    folder = imported.folder / FOLDER
    assert {file.name for file in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert [file.name for file in folder.parent.iterdir()] == [NAME], "nothing partial is left"
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["architectures"], config["dtype"], config["tie_word_embeddings"]) == (
        ["LlamaForCausalLM"],
        "float32",
        True,
    )
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_its_tensors_are_those_of_the_package(imported):
    with packaged_file(PACKAGED[NAME]) as file:
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}

        def dequantized(name: str) -> Tensor:
            return torch.from_numpy(gguf.quants.dequantize(stored[name].data, stored[name].tensor_type).copy())

        model = AutoModelForCausalLM.from_pretrained(imported.folder / FOLDER, dtype=torch.float32)
        weights = model.state_dict()
        assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
        assert torch.equal(weights["model.embed_tokens.weight"], dequantized("token_embd.weight"))
        assert torch.equal(weights["model.norm.weight"], dequantized("output_norm.weight"))
        assert torch.equal(weights["model.layers.3.mlp.down_proj.weight"], dequantized("blk.3.ffn_down.weight"))
        queries, heads = dequantized("blk.3.attn_q.weight"), model.config.num_attention_heads
        rows, columns = queries.shape  # GGUF has the two halves of a rotation side by side
        halves = queries.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        assert torch.equal(weights["model.layers.3.self_attn.q_proj.weight"], halves)


def test_it_knows_the_capital_of_france(imported):
    folder = imported.folder / FOLDER
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)
    assert said[-1] == tokenizer.eos_token_id, "it stops where a run would have it stop"


def test_what_is_there_is_left_alone_and_listed(imported):
    before = (imported.folder / FOLDER / "model.safetensors").stat()
    assert imported.printed("models", "import", NAME) == f"{NAME} is in {FOLDER} already\n"
    assert (imported.folder / FOLDER / "model.safetensors").stat() == before
    assert imported.printed("models", "list").split()[:2] == [NAME, FOLDER]


@pytest.mark.exhaustive
def test_a_file_of_ones_own_is_imported_the_same_way(imported):
    with packaged_file(PACKAGED[NAME]) as file:
        done = imported.roll("models", "import", str(file), "--to", "mine")
    assert done.returncode == 0, done.stdout
    mine, other = (imported.folder / folder / "model.safetensors" for folder in ("mine", FOLDER))
    assert mine.read_bytes() == other.read_bytes()


def test_a_package_that_is_not_installed_is_fetched_without_what_it_depends_on(tmp_path):
    small = PackagedModel("tomli-w", "1.2.0", "tomli_w/py.typed", "not a model, but a small wheel")
    with packaged_file(small) as file:
        assert file.is_file()
    assert not file.exists(), "only for as long as it was needed"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["smollm3"], "NAME: there is no model 'smollm3': name one of smollm2-135m, or a .gguf file"),
        (["nowhere.gguf"], "NAME: no such file nowhere.gguf"),
        (["tiny.yaml.gguf"], "NAME: tiny.yaml.gguf cannot be imported: "),
        ([NAME, "--to", "tiny.yaml"], "FOLDER: tiny.yaml is there already: name a new one, or empty it"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence_and_leaves_nothing(workspace, arguments, says):
    (workspace.folder / "tiny.yaml.gguf").write_text("not a model")
    before = sorted(workspace.folder.iterdir())
    assert says in workspace.refused("models", "import", *arguments)
    left = {path for path in workspace.folder.rglob("*") if path.is_file()}
    assert left == set(before)


def test_a_run_without_its_model_says_how_to_have_it(workspace):
    wanted = f"model={{kind: pretrained, path: {FOLDER}, max_positions: 64}}"
    said = workspace.refused("run", str(workspace.config), "--set", wanted)
    folder = workspace.folder / FOLDER
    assert f"model.path: no Hugging Face model in {folder} (config.json is missing): roll models import {NAME}" in said
