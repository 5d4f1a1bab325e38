"""Process settings of all roles: the environment they inherit, and garbage collection once their models are loaded."""

import gc
import os
from pathlib import Path


def role_environment() -> dict[str, str]:
    """Environment variables to set on every Ray node that a leg starts; its roles inherit them.

    A Ray `runtime_env` would do as well, but each role would import Ray twice, and Ray could not use the workers it
    prestarts.
    """
    return {
        # Roles must not depend on where the leg was started, nor on what else is importable there.
        "PYTHONPATH": os.pathsep.join(_import_paths()),
        "PYTHONWARNINGS": "ignore",
        # OpenMP threads of several roles share cores: waiting threads must not spin for milliseconds, libgomp's default.
        "GOMP_SPINCOUNT": "300",
    }


def freeze_garbage_collector() -> None:
    """Exempt everything loaded so far from garbage collection: a full collection over torch's modules takes 0.3 s."""
    gc.collect()
    gc.freeze()


def _import_paths() -> list[str]:
    root = Path(__file__).resolve().parents[2]
    return [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
