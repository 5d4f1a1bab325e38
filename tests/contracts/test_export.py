"""Export of a policy: Hugging Face loads the trained weights to the bit, the same tokenizer and the same config."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from roll_core.config.model import Architecture, PretrainedModel, ScratchModel
from roll_core.models import characters
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.models.export import write_folder
from roll_core.rollout.renderer import CharacterRenderer, build_renderer
from roll_core.training.learner import Learner
from roll_core.types.trajectory import Message, Speaker
from tests.support import tiny_config, trajectory

SMALL_SHARD = 30_000
"""Bytes of a shard: about a tenth of the tiny model, and less than one of its tensors."""
TEXT = "".join(characters.CHARACTERS) + "sort 3 1 2 =\n\n  <eos><pad>"


def trained_learner(folder: Path, model: dict[str, object]) -> Learner:
    """Learner after one update that changed its policy."""
    learner = Learner(tiny_config(folder, model=model), rank=0, device=torch.device("cpu"))
    before = [tensor.clone() for _, tensor in learner.weights()]
    trajectories = [trajectory(group, attempt, float(attempt % 2)) for group in range(4) for attempt in range(4)]
    learner.update(learner.prepare(trajectories, weights_version=0), 1)
    assert not all(torch.equal(a, b) for a, (_, b) in zip(before, learner.weights(), strict=True))
    return learner


@pytest.fixture(params=list(Architecture))
def model(request) -> ScratchModel:
    return ScratchModel(architecture=request.param, max_positions=32)


@pytest.fixture
def exported(model, tmp_path) -> tuple[Learner, Path]:
    learner = trained_learner(tmp_path, model.model_dump())
    write_folder(model, learner.weights(), tmp_path / "exported")
    return learner, tmp_path / "exported"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([characters.encode("sort 312=")])).logits


def test_weights_and_logits_are_those_of_the_policy_to_the_bit(exported):
    learner, folder = exported
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    trained, exported_weights = dict(learner.weights()), dict(to_checkpoint_names(loaded.named_parameters()))
    assert trained.keys() == exported_weights.keys()
    for name, tensor in trained.items():
        assert exported_weights[name].dtype == tensor.dtype
        assert torch.equal(exported_weights[name], tensor), name
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(logits(loaded), logits(learner._policy._scorer.model))


def test_the_exported_tokenizer_encodes_and_decodes_like_the_one_of_training(exported):
    _, folder = exported
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tuple(tokenizer(TEXT)["input_ids"]) == characters.encode(TEXT)
    assert tokenizer.decode(characters.encode(TEXT)) == TEXT
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (characters.EOS, characters.PAD)
    completion = CharacterRenderer().completion("1 2 3")
    assert tokenizer.decode([*completion, characters.PAD], skip_special_tokens=True) == "1 2 3"
    with pytest.raises(Exception, match="WordLevel"):
        tokenizer("\N{SNOWMAN}")


def test_the_exported_chat_template_renders_prompts_as_in_training(exported):
    _, folder = exported
    messages = (Message(Speaker.USER, "sort 312"), Message(Speaker.USER, "=\n"))
    assert build_renderer(PretrainedModel(path=str(folder))).prompt(messages) == CharacterRenderer().prompt(messages)


def test_the_generation_config_has_the_stop_token_of_training(exported):
    generation = GenerationConfig.from_pretrained(exported[1], local_files_only=True)
    assert (generation.eos_token_id, generation.pad_token_id) == (characters.EOS, characters.PAD)


def test_shards_are_bounded_and_load_as_the_same_model(model, exported, tmp_path):
    learner, _ = exported
    write_folder(model, learner.weights(), tmp_path / "cut", SMALL_SHARD)
    shards = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 3
    for shard in shards:
        with safe_open(shard, "pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= SMALL_SHARD or len(sizes) == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", local_files_only=True)
    for name, tensor in to_checkpoint_names(loaded.named_parameters()):
        assert torch.equal(tensor, dict(learner.weights())[name])


def test_a_pretrained_model_keeps_its_own_config_tokenizer_and_generation_settings(exported, tmp_path):
    _, folder = exported
    GenerationConfig(eos_token_id=[characters.EOS, 5], pad_token_id=characters.PAD, max_new_tokens=7).save_pretrained(folder)
    pretrained = PretrainedModel(path=str(folder), max_positions=32)
    learner = trained_learner(tmp_path, pretrained.model_dump())
    write_folder(pretrained, learner.weights(), tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again", local_files_only=True)
    for name, tensor in to_checkpoint_names(loaded.named_parameters()):
        assert torch.equal(tensor, dict(learner.weights())[name])
    assert loaded.generation_config.max_new_tokens == 7
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "again", local_files_only=True)
    assert tuple(tokenizer(TEXT)["input_ids"]) == characters.encode(TEXT)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(folder, local_files_only=True).chat_template


def test_weights_trained_from_a_half_precision_folder_are_exported_in_float32(exported, tmp_path):
    """Training keeps weights in float32. The exported config must not make Hugging Face round them when loading."""
    learner, folder = exported
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "half")
    write_folder(PretrainedModel(path=str(tmp_path / "half")), learner.weights(), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert torch.equal(logits(loaded), logits(learner._policy._scorer.model))
