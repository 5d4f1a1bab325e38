"""`roll models`: real models as Hugging Face folders, for `model: {kind: pretrained, path: ...}`.

Tensors are handled in a process of their own, as everywhere above the roles.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll_core.errors import UserError
from roll_core.extras import Extra, require
from roll_core.models.packaged import PACKAGED, packaged_file

MODELS = Path("roll-data/models")
SUFFIX = ".gguf"


@dataclass(frozen=True)
class ListedModel:
    """Example: ListedModel("smollm2-135m", Path("roll-data/models/smollm2-135m"), "541 MB")"""

    name: str
    folder: Path
    says: str


def default_folder(name: str) -> Path:
    """Where a model goes: 'smollm2-135m' and '/downloads/Qwen3-0.6B.gguf' -> roll-data/models/Qwen3-0.6B."""
    return MODELS / (Path(name).stem if name.endswith(SUFFIX) else name)


def is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def write_model(name: str, folder: Path) -> None:
    """Write the model of a name, or of a GGUF file, into an empty folder."""
    for module in ("gguf", "accelerate"):
        require(module, Extra.MODELS, "roll models import")
    with _gguf_file(name) as file:
        command = [sys.executable, "-m", "roll_core.models.gguf", str(file), str(folder)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"NAME: {name} cannot be imported: {reason}")


def list_models() -> list[ListedModel]:
    """Models that are there, and those that can be had."""
    there = sorted(folder for folder in MODELS.glob("*") if is_model(folder))
    listed = [ListedModel(folder.name, folder, f"{_megabytes(folder):.0f} MB") for folder in there]
    names = {folder.name for folder in there}
    return listed + [
        ListedModel(name, default_folder(name), f"not there yet: roll models import {name} ({model.description})")
        for name, model in PACKAGED.items()
        if name not in names
    ]


@contextmanager
def _gguf_file(name: str) -> Iterator[Path]:
    if not name.endswith(SUFFIX):
        if name not in PACKAGED:
            raise UserError(f"NAME: there is no model '{name}': name one of {', '.join(PACKAGED)}, or a {SUFFIX} file")
        with packaged_file(PACKAGED[name]) as file:
            yield file
        return
    if not Path(name).is_file():
        raise UserError(f"NAME: no such file {name}")
    yield Path(name).absolute()


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6
