"""Which code this is, so that a manifest can say what made it."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("flows", "infra", "roll_core", "tasks")


@cache
def code_version() -> str:
    """The released version and a digest of the sources that run, edited or not. Example: 0.1.0+9f86d081884c"""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return f"{version('roll')}+{digest.hexdigest()[:12]}"
