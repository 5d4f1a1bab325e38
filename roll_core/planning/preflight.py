"""Checks that need the machine, not only the config: files, folders, whether prompts fit. Each names its key."""

from pathlib import Path

from roll_core.config.model import PretrainedModel
from roll_core.config.run import RunConfig
from roll_core.data.problem_source import build_source
from roll_core.errors import UserError
from roll_core.store.object_store import ObjectStore


def check_ready(config: RunConfig) -> None:
    """Raise one sentence about the first thing that would make the run fail later."""
    model = config.model
    if isinstance(model, PretrainedModel) and not (Path(model.path) / "config.json").is_file():
        raise UserError(f"model.path: no Hugging Face model in {model.path} (config.json is missing)")
    source = build_source(config.problems, config.seed)
    source.held_out(config.evaluation.num_problems)
    ObjectStore(config.store.uri).check_writable()
    _check_folder("work_dir", Path(config.work_dir))
    if config.tracking.uri.startswith("sqlite:///"):
        _check_folder("tracking.uri", Path(config.tracking.uri.removeprefix("sqlite:///")).parent)


def _check_folder(key: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{key}: cannot write to {folder} ({error.strerror}): make it writable or change {key}") from None
