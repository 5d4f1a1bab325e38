"""Offload of a Megatron policy to host memory while an engine has the device.

Megatron has many views of few storages: parameter buffers, gradient buffers, and the ranges of them that a rank updates.
Offload therefore empties the storages under the views, and reload fills them again; no view is created anew.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage


class MegatronOffloader:
    """Mover of a Megatron policy between device and host memory. Offloaded tensors can be read and saved; computing has to
    wait for `reload`. Host memory is allocated once, pinned where there is a GPU, and reused."""

    def __init__(self, device: torch.device):
        self._device = device
        self._host_buffers: list[Tensor] = []
        self._offloaded: list[tuple[UntypedStorage, Tensor]] = []
        """Emptied storages, and the host copies of their bytes."""
        self._emptied: list[tuple[UntypedStorage, int]] = []
        self._repointed: list[tuple[Tensor, Tensor]] = []
        """Tensors that read from the host for now, and their data on the device."""

    def offload(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> None:
        """Free the storages of these tensors and of all views of them. `kept` is copied to the host; `emptied` is dropped,
        and zero after `reload`."""
        if self._offloaded:
            return
        self._offloaded = [(storage, self._copy_to_host(number, storage)) for number, storage in enumerate(_storages(kept))]
        self._synchronize()
        hosts = {storage.data_ptr(): host for storage, host in self._offloaded}
        for tensor in {id(tensor): tensor for tensor in kept}.values():
            device_data = tensor.data
            self._repointed.append((tensor, device_data))
            host = hosts[device_data.untyped_storage().data_ptr()].untyped_storage()
            tensor.data = torch.empty(0, dtype=device_data.dtype).set_(
                host, device_data.storage_offset(), device_data.shape, device_data.stride()
            )
        self._emptied = [(storage, storage.nbytes()) for storage in _storages(emptied)]
        for storage in [*(storage for storage, _ in self._offloaded), *(storage for storage, _ in self._emptied)]:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Fill the storages again and point all tensors back at them; do nothing unless offloaded."""
        for storage, host in self._offloaded:
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host, non_blocking=True)
        for storage, num_bytes in self._emptied:
            storage.resize_(num_bytes)
            _bytes_of(storage).zero_()
        for tensor, device_data in self._repointed:
            tensor.data = device_data
        self._synchronize()
        self._offloaded, self._emptied, self._repointed = [], [], []

    def _copy_to_host(self, number: int, storage: UntypedStorage) -> Tensor:
        if number == len(self._host_buffers) or len(self._host_buffers[number]) != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._host_buffers[number : number + 1] = [host]
        return self._host_buffers[number].copy_(_bytes_of(storage), non_blocking=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Storages of the tensors, each once, without empty ones."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
