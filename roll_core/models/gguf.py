"""A GGUF file as a folder that Hugging Face's `from_pretrained` reads: quantized weights become plain float32 ones.

Run as `python -m roll_core.models.gguf FILE FOLDER`, in a process of its own: the command line holds no tensors.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from roll_core.errors import one_line

ORIGIN = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""What a config says of the file it came from, and no longer holds."""


def write_gguf_folder(file: Path, folder: Path) -> None:
    """Write safetensors, config, generation config, tokenizer and chat template of the model in a GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = _unquantized(AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32))
    model.generation_config = _generation_config(tokenizer)
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _unquantized(read: PreTrainedModel) -> PreTrainedModel:
    """The same tensors in a plain model: one that was read from GGUF counts as quantized, and refuses to be saved."""
    values: dict[str, Any] = {key: value for key, value in read.config.to_dict().items() if key not in ORIGIN}
    config = type(read.config).from_dict(values | {"architectures": [type(read).__name__]})
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def _generation_config(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad)


def main(file: str, folder: str) -> int:
    """Convert; what the file makes impossible is one line, for the command that started this."""
    logging.set_verbosity_error()
    try:
        write_gguf_folder(Path(file), Path(folder))
    except (ValueError, LookupError, NotImplementedError, RuntimeError, OSError) as error:
        sys.stderr.write(f"{one_line(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
