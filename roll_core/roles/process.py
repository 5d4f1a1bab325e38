"""What every role's process begins with, and what it does once its models are loaded."""

import gc
import os
from pathlib import Path


def role_environment() -> dict[str, str]:
    """To be set for every node of Ray that a leg starts, whose roles inherit it.

    Told to Ray as a `runtime_env` instead, it would have each role import Ray twice, and those it starts ahead be of no use.
    """
    return {
        # Roles must not depend on where the leg was started, nor on what else is importable there.
        "PYTHONPATH": os.pathsep.join(_import_paths()),
        "PYTHONWARNINGS": "ignore",
        # OpenMP threads of several roles share cores: those that wait must not spin for milliseconds, as libgomp's do.
        "GOMP_SPINCOUNT": "300",
    }


def settle() -> None:
    """Exempt everything loaded so far from garbage collection: a full collection over torch's modules takes 0.3 s."""
    gc.collect()
    gc.freeze()


def _import_paths() -> list[str]:
    root = Path(__file__).resolve().parents[2]
    return [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
