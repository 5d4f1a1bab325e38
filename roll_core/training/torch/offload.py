"""Where weights and optimizer state are: on their device, or in host memory while an engine has the device."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll_core.training.snapshot import local_part

_ALIGNMENT = 128
"""Numbers: 512 bytes, which every matrix product is content with."""


def lay_flat(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device with all its parameters in one allocation, so that another process can be given them by one
    handle. Each of them goes there by itself: they are never twice on the device."""
    parameters = list(module.parameters())
    sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
    (dtype,) = {parameter.dtype for parameter in parameters}
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    for parameter, start in zip(parameters, accumulate(sizes[:-1], initial=0), strict=True):
        place = flat[start : start + parameter.numel()].view(parameter.shape)
        place.copy_(parameter.data, non_blocking=True)
        parameter.data = place
    module.to(device)  # its buffers


class Offloader:
    """Of modules and an optimizer. Sharded tensors stay sharded: each rank moves what it holds.

    What is on the host can be read and saved there; computing has to wait until it is back. Host memory is taken once,
    pinned where there is a GPU, and used again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._host: list[Tensor] = []
        self._is_away = False

    def offload(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """To host memory; the device's is free for other processes afterwards."""
        if self._is_away:
            return
        moving = _Moving(self._host)
        for module in modules:
            module._apply(moving)  # what .to() is made of; FSDP hangs on it, too
        _replace_state(optimizer, moving)
        self._host = moving.taken
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        self._is_away = True

    def reload(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        if not self._is_away:
            return
        for module in modules:
            if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
                module.to(self._device)
            else:
                lay_flat(module, self._device)
        # Copies, where device and host are one: the next time they leave, it is for the same memory.
        _replace_state(
            optimizer, lambda value: _like(value, local_part(value).to(self._device, copy=True, non_blocking=True))
        )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._is_away = False


class _Moving:
    """Moves tensors to the host, one after another, into the places that it had the last time."""

    def __init__(self, places: list[Tensor]):
        self._places = iter(places)
        self.taken: list[Tensor] = []
        self._addresses: set[int] = set()

    def __call__(self, tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        if local.data_ptr() in self._addresses:
            return tensor  # a weight that two modules have, and that has moved
        place = next(self._places, None)
        if place is None or place.shape != local.shape or place.dtype != local.dtype:
            place = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        self.taken.append(place)
        self._addresses.add(place.data_ptr())
        return _like(tensor, place.copy_(local, non_blocking=True))


def _replace_state(optimizer: torch.optim.Optimizer, moved: Callable[[Tensor], Tensor]) -> None:
    for state in optimizer.state.values():
        for name, value in _tensors(state):
            state[name] = moved(value)


def _tensors(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in list(state.items()) if isinstance(value, Tensor))


def _like(tensor: Tensor, local: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
