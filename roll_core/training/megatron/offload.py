"""Where a Megatron policy is: on its device, or in host memory while an engine has the device.

Megatron has many views of few memories: buffers of parameters and of gradients, and the parts of them that a rank moves. So
the memory is taken from under the views, and given back; none of them is made again.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage


class MegatronOffloader:
    """What is on the host can be read and saved there; computing has to wait until it is back. Host memory is taken once,
    pinned where there is a GPU, and used again."""

    def __init__(self, device: torch.device):
        self._device = device
        self._places: list[Tensor] = []
        self._left: list[tuple[UntypedStorage, Tensor]] = []
        """Memories without their bytes, and where those are."""
        self._emptied: list[tuple[UntypedStorage, int]] = []
        self._moved: list[tuple[Tensor, Tensor]] = []
        """Tensors that are read from the host, and what they are of the device's memory."""

    def offload(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> None:
        """Give up the memory of these tensors and of all that are views of the same; of `emptied` nothing is kept."""
        if self._left:
            return
        self._left = [(memory, self._copied(number, memory)) for number, memory in enumerate(_memories(kept))]
        self._synchronize()
        places = {memory.data_ptr(): place for memory, place in self._left}
        for tensor in {id(tensor): tensor for tensor in kept}.values():
            here = tensor.data
            self._moved.append((tensor, here))
            place = places[here.untyped_storage().data_ptr()].untyped_storage()
            tensor.data = torch.empty(0, dtype=here.dtype).set_(place, here.storage_offset(), here.shape, here.stride())
        self._emptied = [(memory, memory.nbytes()) for memory in _memories(emptied)]
        for memory in [*(memory for memory, _ in self._left), *(memory for memory, _ in self._emptied)]:
            memory.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        for memory, place in self._left:
            memory.resize_(len(place))
            _bytes_of(memory).copy_(place, non_blocking=True)
        for memory, num_bytes in self._emptied:
            memory.resize_(num_bytes)
            _bytes_of(memory).zero_()
        for tensor, here in self._moved:
            tensor.data = here
        self._synchronize()
        self._left, self._emptied, self._moved = [], [], []

    def _copied(self, number: int, memory: UntypedStorage) -> Tensor:
        if number == len(self._places) or len(self._places[number]) != memory.nbytes():
            place = torch.empty(memory.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._places[number : number + 1] = [place]
        return self._places[number].copy_(_bytes_of(memory), non_blocking=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _memories(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Those that tensors are views of, each once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return list({memory.data_ptr(): memory for memory in found if memory.nbytes()}.values())


def _bytes_of(memory: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
