"""Process settings of all roles: the environment they inherit, garbage collection once their models are loaded, and where
they run."""

import functools
import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from roll_core.errors import DeviceFault, is_device_fault, one_line

Role = TypeVar("Role", bound=type)


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


def node_name() -> str:
    """Name of this node as the launcher knows it, which is not always the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@contextmanager
def naming_device() -> Iterator[None]:
    """Raise a DeviceFault, which names this node and the GPU of this role, in place of a CUDA error of a broken GPU."""
    try:
        yield
    except RuntimeError as error:
        if not is_device_fault(error):
            raise
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "?")  # Ray sets it for each role: to one GPU, or to all of an engine
        raise DeviceFault({node_name(): f"GPU {gpu} failed ({one_line(error)})"}) from error


def names_device(role: Role) -> Role:
    """Decorate a role's class: `naming_device` applies to its public methods."""
    for name, method in list(vars(role).items()):
        if callable(method) and not name.startswith("_"):
            setattr(role, name, _naming_device(method))
    return role


def _naming_device(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def named(*args: Any, **kwargs: Any) -> Any:
        with naming_device():
            return method(*args, **kwargs)

    return named


def freeze_garbage_collector() -> None:
    """Exempt everything loaded so far from garbage collection: a full collection over torch's modules takes 0.3 s."""
    gc.collect()
    gc.freeze()


def _import_paths() -> list[str]:
    root = Path(__file__).resolve().parents[2]
    return [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
