"""Host-memory copies of state dicts, from which checkpoints are written while training continues."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from roll_core.weights.ranks import rank


class HostCopy:
    """Copy of a state dict in host memory, made again into the same memory. Sharded tensors stay sharded: each rank copies
    its shards.

    Allocating memory for the first copy takes longer than the copy itself. For tensors on a GPU the memory is pinned, which
    makes later copies faster.
    """

    def __init__(self) -> None:
        self._copy: Any = None

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state as it is now. This overwrites the copy that an earlier call returned."""
        self._copy = _copy_state(state, self._copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._copy


def written_files(folder: Path) -> list[Path]:
    """Checkpoint files that this rank wrote. Rank 0 also wrote the metadata, last of all; nothing can be read without it."""
    mine = sorted(folder.glob(f"__{rank()}_*.distcp"))
    return [*mine, folder / ".metadata"] if rank() == 0 else mine


def _copy_state(state: Any, into: Any) -> Any:
    """Copy recursively, into the tensors of an earlier copy (`into`) where shapes and dtypes match."""
    match state:
        case dict():
            earlier = into if isinstance(into, dict) else {}
            return {key: _copy_state(value, earlier.get(key)) for key, value in state.items()}
        case list() | tuple():
            parts = into if isinstance(into, list | tuple) and len(into) == len(state) else [None] * len(state)
            return type(state)(_copy_state(value, part) for value, part in zip(state, parts, strict=True))
        case Tensor():
            return _copy_tensor(state.detach(), into)
        case _:
            return state


def _copy_tensor(tensor: Tensor, into: Any) -> Tensor:
    if not isinstance(into, Tensor) or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = tensor.to("cpu", copy=True)
        return into.pin_memory() if tensor.is_cuda and not isinstance(into, DTensor) else into
    local_shard(into).copy_(local_shard(tensor), non_blocking=True)
    return into


def local_shard(tensor: Tensor) -> Tensor:
    """Shard of a distributed tensor on this rank, or the plain tensor itself; without gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
