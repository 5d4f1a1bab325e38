"""Export of a policy as a folder that Hugging Face's `from_pretrained` reads: safetensors, config and tokenizer.

Memory stays bounded: tensors arrive one at a time and are written in shards.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from roll_core.config.model import ModelConfig, PretrainedModel, ScratchModel
from roll_core.models import characters
from roll_core.models.causal_lm import model_config
from roll_core.models.tensor_files import SHARD_BYTES, SOLE_WRITER, WriterRank, write_tensors

GENERATION = "generation_config.json"
CONTENT_ONLY_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that concatenates message contents without markup, as `CharacterRenderer` does."""


def write_folder(
    model: ModelConfig,
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
    writer: WriterRank = SOLE_WRITER,
) -> None:
    """Write tensors by Hugging Face name, in the dtype they have, with the config and tokenizer of their model.

    Several ranks may write one folder together; rank 0 then writes the files that are not weights.
    """
    dtype = write_tensors(weights, folder, shard_bytes, writer)
    if writer.rank > 0:
        return
    config = model_config(model)
    match model:
        case ScratchModel():
            GenerationConfig(eos_token_id=characters.EOS, pad_token_id=characters.PAD).save_pretrained(folder)
            character_tokenizer(model.max_positions).save_pretrained(folder)
        case PretrainedModel():
            if (Path(model.path) / GENERATION).is_file():
                shutil.copyfile(Path(model.path) / GENERATION, folder / GENERATION)
            AutoTokenizer.from_pretrained(model.path, local_files_only=True).save_pretrained(folder)
    config.dtype = dtype
    config.save_pretrained(folder)


def character_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """Build `characters` as a Hugging Face tokenizer with the same token ids. An unknown character is an error there,
    too."""
    vocabulary = {token: number for number, token in enumerate(characters.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<not a token>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=characters.VOCABULARY[characters.PAD],
        eos_token=characters.VOCABULARY[characters.EOS],
        split_special_tokens=True,  # "<eos>" in a text becomes five characters
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
        chat_template=CONTENT_ONLY_TEMPLATE,
    )
