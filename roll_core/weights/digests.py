"""Digests of whole policies: equal weights have equal digests under every transport, and any differing bit changes the
digest.

On CPUs the digest is SHA-256 of the bytes. On GPUs that would mean a copy to the host, so each tensor is first mixed into a
64-bit integer on the GPU, from every element and its position, and SHA-256 covers those integers. The GPU digest does not
resist deliberate forgery, which is not a threat here. CPU and GPU digests of the same weights differ.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**24
"""Elements mixed at a time on CPUs; each chunk needs 128 MiB of temporary memory."""
POSITION_FACTOR, FIRST_FACTOR, SECOND_FACTOR = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
"""Odd multipliers with random-looking bits (after SplitMix64)."""
_INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsDigest:
    """Digest of a policy, computed from a stream of tensors with `observe`, or from many tensors at once with `add`.

    digest = WeightsDigest()
    buckets = list(pack(digest.observe(backend.weights())))
    digest.hexdigest()
    """

    def __init__(self) -> None:
        self._entries, self._bytes = hashlib.sha256(), hashlib.sha256()
        self._mixed: list[Tensor] = []

    def observe(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged and add each to the digest."""
        for one in tensors:
            self.add([one])
            yield one

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Add the next tensors to the digest; tensors on a GPU are mixed in one launch."""
        for name, tensor in tensors:
            self._entries.update(f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}\n".encode())
            if not tensor.is_cuda:
                self._bytes.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        if on_gpu := [tensor.detach() for _, tensor in tensors if tensor.is_cuda]:
            self._mixed.append(mix(on_gpu))

    def hexdigest(self) -> str:
        """Hexadecimal digest of the tensors added so far."""
        content = self._bytes.copy()
        if self._mixed:
            content.update(torch.cat(self._mixed).cpu().numpy().data)
        return hashlib.sha256(self._entries.digest() + content.digest()).hexdigest()


def mix(tensors: Sequence[Tensor]) -> Tensor:
    """Mix each tensor into one 64-bit integer [T], from every element and its position. Integer sums do not depend on the
    order of addition, so the result is deterministic."""
    if tensors[0].is_cuda:
        from roll_core.weights.digest_kernel import mix_on_gpu

        return mix_on_gpu(tensors, POSITION_FACTOR, FIRST_FACTOR, SECOND_FACTOR)
    return torch.stack([_mix(tensor) for tensor in tensors])


def _mix(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().flatten().view(_INTEGER_TYPES[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64)
    for start in range(0, len(flat), _CHUNK_ELEMENTS):
        elements = flat[start : start + _CHUNK_ELEMENTS].long()
        elements += torch.arange(start, start + len(elements)) * POSITION_FACTOR
        elements = (elements ^ (elements >> 29)) * FIRST_FACTOR
        elements = (elements ^ (elements >> 32)) * SECOND_FACTOR
        total += (elements ^ (elements >> 27)).sum()
    return total
