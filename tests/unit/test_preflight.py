"""Checks of a config against the machine: each mistake is one sentence that names the key and a fix, before a run starts."""

import json
from pathlib import Path

import pytest

from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.models.characters import VOCABULARY
from roll_core.models.export import character_tokenizer
from roll_core.planning.preflight import check_ready
from tests.support import tiny_config

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}


def write_model(folder: Path, vocabulary: int = len(VOCABULARY), chat_template: str | None = "{{ messages }}") -> Path:
    """Write the config and the tokenizer of a model; the checks read no weights."""
    tokenizer = character_tokenizer(32)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    model = SIZES | {"vocab_size": vocabulary, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def with_model(folder: Path, path: Path | str) -> RunConfig:
    return tiny_config(folder, model={"kind": "pretrained", "path": str(path), "max_positions": 32})


def refusal_of(config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        check_ready(config)
    return str(caught.value)


def test_the_name_of_a_model_on_the_hub_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refusal_of(with_model(tmp_path, "Qwen/Qwen3-0.6B"))
    assert said.endswith(f"(config.json is missing): hf download Qwen/Qwen3-0.6B --local-dir {tmp_path}/Qwen/Qwen3-0.6B")


def test_a_model_without_a_chat_template_is_told_what_to_add(tmp_path):
    said = refusal_of(with_model(tmp_path, write_model(tmp_path / "model", chat_template=None)))
    assert said.startswith(f"model.path: the tokenizer in {tmp_path}/model has no chat template")
    assert "put a file chat_template.jinja into the folder" in said


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert f"model.path: the tokenizer in {folder} cannot be loaded" in refusal_of(with_model(tmp_path, folder))


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path):
    said = refusal_of(with_model(tmp_path, write_model(tmp_path / "model", vocabulary=10)))
    assert f"the tokenizer has {len(VOCABULARY)} tokens, but the model has embeddings for 10" in said


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("rollout", {"num_groups": 1_000_000, "group_size": 2, "max_new_tokens": 5}),
        ("evaluation", {"num_problems": 1_000_000}),
    ],
)
def test_the_checks_of_a_large_run_take_no_longer(tmp_path, section, values):
    """A million problems are accepted; before the run, only some of them are generated and rendered."""
    problems = {"kind": "arithmetic", "puzzle": "sort", "digits": 8}
    check_ready(tiny_config(tmp_path, problems=problems, **{section: values}))


def test_puzzles_that_are_too_long_are_refused_after_the_first(tmp_path):
    problems = {"kind": "arithmetic", "digits": 1000}
    said = refusal_of(tiny_config(tmp_path, problems=problems, evaluation={"num_problems": 1_000_000}))
    assert "problem sort/held-out/0: prompt too long: 1001 tokens of 27 allowed (model.max_positions 32 less" in said


def test_a_held_out_file_that_repeats_the_training_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    rows = str(tmp_path / "rows.jsonl")
    config = tiny_config(
        tmp_path, problems={"kind": "jsonl", "train": rows, "held_out": rows}, evaluation={"num_problems": 1}
    )
    assert refusal_of(config).startswith("problems.held_out: 1 of its 1 problems are also in problems.train")
