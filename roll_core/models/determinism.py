"""Deterministic arithmetic of a process that runs models: equal inputs on equal machines give equal bits.

Trainer ranks and the torch engine call `make_deterministic` before they build a model, if `training.deterministic` is true.
"""

import os
from typing import Any

import torch

ENVIRONMENT = {
    # One workspace of a fixed size for each cuBLAS stream: a shared one makes matrix products depend on timing.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Ring's order of additions is fixed by the topology. NCCL else chooses an algorithm by size and by what the nodes offer,
    # such as additions in the switch (NVLS).
    "NCCL_ALGO": "Ring",
}
"""Environment variables that CUDA libraries read when they are first used. A value that is already set is kept."""


def make_deterministic() -> None:
    """Use deterministic algorithms in this process, from now on. An operation that has none raises RuntimeError."""
    _switch_on(warn_only=False)


def make_deterministic_where_possible() -> None:
    """Use deterministic algorithms in this process wherever torch has one. For inference: torch declares its cumulative sum
    on GPUs, by which tokens are drawn, not deterministic; its rounding error in float64 could only decide a tie."""
    _switch_on(warn_only=True)


def _switch_on(*, warn_only: bool) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Every torch.empty would be filled with NaN, for programs that read memory before they write it.
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
