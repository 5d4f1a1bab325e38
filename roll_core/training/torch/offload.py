"""Offload of weights and optimizer state to host memory while an engine has the device."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll_core.training.snapshot import local_shard

_ALIGNMENT = 128
"""Elements; 512 bytes in float32, an alignment that every matrix product kernel accepts."""


def flatten_parameters(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device with all its parameters in one allocation, so that one handle shares them with another
    process. Parameters move one by one, so that none is on the device twice."""
    parameters = list(module.parameters())
    sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
    (dtype,) = {parameter.dtype for parameter in parameters}
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    for parameter, start in zip(parameters, accumulate(sizes[:-1], initial=0), strict=True):
        buffer = flat[start : start + parameter.numel()].view(parameter.shape)
        buffer.copy_(parameter.data, non_blocking=True)
        parameter.data = buffer
    module.to(device)  # its buffers


class Offloader:
    """Mover of modules and their optimizer between device and host memory. Sharded tensors stay sharded: each rank moves its
    shards.

    Offloaded tensors can be read and saved; computing has to wait for `reload`. Host memory is allocated once, pinned where
    there is a GPU, and reused.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._host_buffers: list[Tensor] = []
        self._is_offloaded = False

    def offload(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Move all tensors to host memory and free the device memory for other processes; do nothing if offloaded."""
        if self._is_offloaded:
            return
        mover = _HostMover(self._host_buffers)
        for module in modules:
            module._apply(mover)  # the function behind .to(); FSDP hooks into it, too
        _replace_state(optimizer, mover)
        self._host_buffers = mover.used
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        self._is_offloaded = True

    def reload(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Move all tensors back to the device; do nothing unless offloaded."""
        if not self._is_offloaded:
            return
        for module in modules:
            if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
                module.to(self._device)
            else:
                flatten_parameters(module, self._device)
        # A copy even where the device is the host: the next offload writes into the same host buffers.
        _replace_state(
            optimizer, lambda value: _wrap_like(value, local_shard(value).to(self._device, copy=True, non_blocking=True))
        )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._is_offloaded = False


class _HostMover:
    """Function that moves tensors to the host, one after another, into the host buffers of the last offload."""

    def __init__(self, buffers: list[Tensor]):
        self._buffers = iter(buffers)
        self.used: list[Tensor] = []
        self._addresses: set[int] = set()

    def __call__(self, tensor: Tensor) -> Tensor:
        local = local_shard(tensor)
        if local.data_ptr() in self._addresses:
            return tensor  # a weight shared by two modules, already moved
        buffer = next(self._buffers, None)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        self.used.append(buffer)
        self._addresses.add(buffer.data_ptr())
        return _wrap_like(tensor, buffer.copy_(local, non_blocking=True))


def _replace_state(optimizer: torch.optim.Optimizer, move: Callable[[Tensor], Tensor]) -> None:
    for state in optimizer.state.values():
        for name, value in _tensors(state):
            state[name] = move(value)


def _tensors(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in list(state.items()) if isinstance(value, Tensor))


def _wrap_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Wrap a local shard as a distributed tensor like `tensor`, if that is distributed."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
