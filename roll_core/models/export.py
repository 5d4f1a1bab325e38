"""A policy as a folder that Hugging Face's `from_pretrained` reads: safetensors, config, tokenizer. Memory stays bounded:
tensors arrive one at a time and leave in shards."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from roll_core.config.model import ModelConfig, PretrainedModel, ScratchModel
from roll_core.models import characters
from roll_core.models.causal_lm import scratch_config

SHARD_BYTES = 2 * 10**9
"""Held in memory at once. Larger shards are fewer files; readers take them tensor by tensor either way."""
INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
MESSAGES_AS_THEY_ARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template of `CharacterRenderer`."""


def write_folder(
    model: ModelConfig, weights: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write full tensors by Hugging Face name, as precise as they come, and what belongs to the model they are of."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = _write_weights(weights, folder, shard_bytes)
    match model:
        case ScratchModel():
            config = scratch_config(model)
            GenerationConfig(eos_token_id=characters.EOS, pad_token_id=characters.PAD).save_pretrained(folder)
            character_tokenizer(model.max_positions).save_pretrained(folder)
        case PretrainedModel():
            config = AutoConfig.from_pretrained(model.path, local_files_only=True)
            if (Path(model.path) / GENERATION).is_file():
                shutil.copyfile(Path(model.path) / GENERATION, folder / GENERATION)
            AutoTokenizer.from_pretrained(model.path, local_files_only=True).save_pretrained(folder)
    config.dtype = dtype
    config.save_pretrained(folder)


def character_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """`characters` as a Hugging Face tokenizer: the same ids; a character it does not know is an error there, too."""
    vocabulary = {token: number for number, token in enumerate(characters.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<not a token>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=characters.VOCABULARY[characters.PAD],
        eos_token=characters.VOCABULARY[characters.EOS],
        split_special_tokens=True,  # "<eos>" in a text is five characters
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
        chat_template=MESSAGES_AS_THEY_ARE,
    )


def _write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> torch.dtype:
    """Shards of bounded size and, if there are several, their index; answers what numbers they hold."""
    held: list[tuple[str, ...]] = []
    total, dtype = 0, torch.float32
    for shard in _shards(weights, shard_bytes):
        save_file(shard, folder / _unnumbered(len(held)), metadata={"format": "pt"})
        held.append(tuple(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = next(iter(shard.values())).dtype
    if len(held) == 1:
        (folder / _unnumbered(0)).rename(folder / "model.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for number, names in enumerate(held):
        file = f"model-{number + 1:05d}-of-{len(held):05d}.safetensors"
        (folder / _unnumbered(number)).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return dtype


def _shards(weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """A tensor larger than a shard gets one of its own."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _unnumbered(number: int) -> str:
    """The name of a shard until it is known how many there are."""
    return f"shard-{number}.safetensors"
