"""A copy of a state dict in host memory, which what is copied can change away from. Made again into the same memory."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from roll_core.weights.ranks import rank


class HostCopy:
    """Sharded tensors stay sharded: each rank copies what it holds.

    Memory for the first copy costs more than the copy. Where tensors are on a GPU it is pinned, which later copies gain by.
    """

    def __init__(self) -> None:
        self._copy: Any = None

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state as it is now. What an earlier call answered is overwritten."""
        self._copy = _copied(state, self._copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._copy


def written_files(folder: Path) -> list[Path]:
    """Those of this rank. The metadata, without which nothing can be read, is rank 0's and written last."""
    mine = sorted(folder.glob(f"__{rank()}_*.distcp"))
    return [*mine, folder / ".metadata"] if rank() == 0 else mine


def _copied(state: Any, into: Any) -> Any:
    match state:
        case dict():
            earlier = into if isinstance(into, dict) else {}
            return {key: _copied(value, earlier.get(key)) for key, value in state.items()}
        case list() | tuple():
            parts = into if isinstance(into, list | tuple) and len(into) == len(state) else [None] * len(state)
            return type(state)(_copied(value, part) for value, part in zip(state, parts, strict=True))
        case Tensor():
            return _copied_tensor(state.detach(), into)
        case _:
            return state


def _copied_tensor(tensor: Tensor, into: Any) -> Tensor:
    if not isinstance(into, Tensor) or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = tensor.to("cpu", copy=True)
        return into.pin_memory() if tensor.is_cuda and not isinstance(into, DTensor) else into
    local_part(into).copy_(local_part(tensor), non_blocking=True)
    return into


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor; a plain tensor itself. Without gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
