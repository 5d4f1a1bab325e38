"""Digests of whole policies: the same weights give the same digest, and a bit that differs another, whatever they travel in.

On a CPU it is SHA-256 of the bytes. A GPU would have to send them to the host for that, so it mixes every number with its
place by itself, tensor by tensor, and SHA-256 is of the results: not safe against forgery, which nobody attempts here.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = 2**24
"""Numbers that are mixed at once: 128 MiB while it lasts."""
PLACE, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
"""Odd numbers whose bits look random (after SplitMix64)."""
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsDigest:
    """Sees tensors go by, each once, or is given many that stay where they are.

    digest = WeightsDigest()
    buckets = list(pack(digest.over(backend.weights())))
    digest.hexdigest()
    """

    def __init__(self) -> None:
        self._entries, self._bytes = hashlib.sha256(), hashlib.sha256()
        self._mixed: list[Tensor] = []

    def over(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for one in tensors:
            self.add([one])
            yield one

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """The next ones, those on a GPU all at once."""
        for name, tensor in tensors:
            self._entries.update(f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}\n".encode())
            if not tensor.is_cuda:
                self._bytes.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        if on_gpu := [tensor.detach() for _, tensor in tensors if tensor.is_cuda]:
            self._mixed.append(mix(on_gpu))

    def hexdigest(self) -> str:
        content = self._bytes.copy()
        if self._mixed:
            content.update(torch.cat(self._mixed).cpu().numpy().data)
        return hashlib.sha256(self._entries.digest() + content.digest()).hexdigest()


def mix(tensors: Sequence[Tensor]) -> Tensor:
    """One 64-bit number for each [T], by every number in it and its place. Sums of integers have no order."""
    if tensors[0].is_cuda:
        from roll_core.weights.digest_kernel import mix_on_gpu

        return mix_on_gpu(tensors, PLACE, FIRST, SECOND)
    return torch.stack([_mix(tensor) for tensor in tensors])


def _mix(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().flatten().view(_AS_INTEGERS[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64)
    for start in range(0, len(flat), _CHUNK):
        numbers = flat[start : start + _CHUNK].long()
        numbers += torch.arange(start, start + len(numbers)) * PLACE
        numbers = (numbers ^ (numbers >> 29)) * FIRST
        numbers = (numbers ^ (numbers >> 32)) * SECOND
        total += (numbers ^ (numbers >> 27)).sum()
    return total
