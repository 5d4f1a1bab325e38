"""Conversion of a GGUF file to a folder that Hugging Face's `from_pretrained` reads, with weights dequantized to float32.

Run as `python -m roll_core.models.gguf FILE FOLDER`, in a process of its own, because the command line imports no torch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from roll_core.errors import one_line

SOURCE_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""Config keys that describe the GGUF file and do not hold for the converted model."""


def write_gguf_folder(file: Path, folder: Path) -> None:
    """Write safetensors, config, generation config, tokenizer and chat template of the model in a GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = _unquantized(AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32))
    model.generation_config = _generation_config(tokenizer)
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _unquantized(read: PreTrainedModel) -> PreTrainedModel:
    """Move the tensors into a plain model. A model read from GGUF counts as quantized, and transformers refuses to save
    it."""
    values: dict[str, Any] = {key: value for key, value in read.config.to_dict().items() if key not in SOURCE_KEYS}
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
    """Convert and return the exit code. An unsupported file is reported to stderr in one line, for the calling command."""
    logging.set_verbosity_error()
    try:
        write_gguf_folder(Path(file), Path(folder))
    except (ValueError, LookupError, NotImplementedError, RuntimeError, OSError) as error:
        sys.stderr.write(f"{one_line(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
