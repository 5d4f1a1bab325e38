"""Weights loaded where they are used, again and again: what the model's own loader copies where is noted the first time, and
then copied without it. A loader looks up every name, cuts fused matrices and finds this rank's part of them, which takes far
longer than the copies on a GPU.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from roll_core.weights.buckets import FlatLayout, cut

Named = list[tuple[str, Tensor]]


class Loading(Protocol):
    """A model that knows where weights belong."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object: ...

    def parameters(self) -> Iterable[nn.Parameter]: ...


@dataclass(frozen=True, eq=False)
class _Copy:
    """Part of a tensor, and where in the model it goes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Numbers after the first of the tensor."""
    target: Tensor

    @property
    def is_dense(self) -> bool:
        """Whether it is numbers in a row."""
        return self.stride == torch.empty(self.size, device="meta").stride()

    def source(self, tensor: Tensor, start: int = 0) -> Tensor:
        """In the tensor, or in numbers of which the tensor's begin at `start`."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + start + self.offset)


class ReplayedLoad:
    """Give it all weights, in any number of parts; then `settle`; the next time it knows how."""

    def __init__(self, model: Loading):
        self._model = model
        self._copies: dict[str, list[_Copy]] = {}
        self._in_flat: dict[FlatLayout, _FlatLoad] = {}
        self._num_written = 0
        self.is_known = False
        """Whether every number of the model was seen to be copied, or set: only then the loader is not missed."""

    @torch.no_grad()
    def load(self, named: Named) -> None:
        if not self.is_known:
            with _Noting(named, self):
                self._model.load_weights(iter(named))
            return
        _copy_all([(copy.target, copy.source(tensor)) for name, tensor in named for copy in self._copies.get(name, ())])

    @torch.no_grad()
    def load_flat(self, flat: Tensor, layout: FlatLayout) -> None:
        """The same for tensors that lie in flat bytes. If they lie as they did before, they are not cut out one by one,
        which takes as long as all copies."""
        known = self._in_flat.get(layout)
        if known is None and self.is_known and len({entry.dtype for entry in layout.entries}) == 1:
            known = self._in_flat[layout] = _FlatLoad(layout, self._copies)
        if known is None:
            self.load(list(cut(flat, layout.entries, layout.starts)))
        else:
            known.copy(flat)

    def settle(self) -> None:
        """All weights have been given."""
        if not self.is_known:
            self.is_known = self._num_written == sum(parameter.numel() for parameter in self._model.parameters())
            if not self.is_known:
                self._copies = {}
            self._num_written = 0

    def note(self, name: str, copy: _Copy) -> None:
        self._copies.setdefault(name, []).append(copy)
        self._num_written += copy.target.numel()

    def note_set(self, target: Tensor) -> None:
        """Padding, which stays what it is."""
        self._num_written += target.numel()


class _FlatLoad:
    """What is copied from numbers of one kind that lie in a row, each with how many of them are before the tensor that it is
    part of. On a GPU nearly all of it is one launch."""

    def __init__(self, layout: FlatLayout, copies_by_name: Mapping[str, list[_Copy]]):
        self._dtype: torch.dtype = getattr(torch, layout.entries[0].dtype)
        copies = [
            (copy, start // self._dtype.itemsize)
            for entry, start in zip(layout.entries, layout.starts, strict=True)
            for copy in copies_by_name.get(entry.name, ())
        ]
        self._launches: list[Callable[[Tensor], None]] = []
        self._rest = copies
        if any(copy.target.is_cuda for copy, _ in copies):
            from roll_core.inference.vllm.copy_kernel import CopyTable, FlatCopy  # needs Triton

            flat = {place: FlatCopy(start + copy.offset, copy.target) for place, (copy, start) in enumerate(copies)}
            suits = {place: one for place, one in flat.items() if copies[place][0].is_dense and one.is_aligned}
            for dtype in {one.target.dtype for one in suits.values()}:
                table = CopyTable([one for one in suits.values() if one.target.dtype is dtype])
                self._launches.append(table.copy)
            self._rest = [pair for place, pair in enumerate(copies) if place not in suits]

    def copy(self, flat: Tensor) -> None:
        numbers = flat[: len(flat) // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        for launch in self._launches:
            launch(numbers)
        _copy_all([(copy.target, copy.source(numbers, start)) for copy, start in self._rest])


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Each source to its target, all of them at once."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))


class _Noting(TorchDispatchMode):
    """Sees every operation of the loader. What is not copied straight from what was given is not noted: then not every
    number of the model is accounted for, and the loader is asked again the next time."""

    def __init__(self, named: Named, notes: ReplayedLoad):
        super().__init__()
        self._notes = notes
        self._named = sorted(named, key=lambda one: one[1].data_ptr())
        self._addresses = [tensor.data_ptr() for _, tensor in self._named]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.copy_.default:
            target, source = args[:2]
            found = self._find(source)
            if found is not None and target.shape == source.shape:
                name, offset = found
                self._notes.note(name, _Copy(tuple(source.shape), source.stride(), offset, target.detach()))
        elif function is torch.ops.aten.fill_.Scalar:
            self._notes.note_set(args[0])
        return result

    def _find(self, source: Tensor) -> tuple[str, int] | None:
        """Which of the given tensors this is part of, and at which number of it that begins."""
        place = bisect.bisect_right(self._addresses, source.data_ptr()) - 1
        if place < 0:
            return None
        name, tensor = self._named[place]
        distance = source.data_ptr() - tensor.data_ptr()
        if distance >= tensor.nbytes or source.dtype != tensor.dtype:
            return None
        return name, distance // tensor.itemsize
