"""Fast repeated loading of weights into vLLM's model, by replaying the copies that the model's own loader made the first
time.

A loader looks up every name, splits fused matrices and finds this rank's part of them. On a GPU that takes far longer than
the copies themselves.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from roll_core.weights.buckets import FlatLayout, split_flat

Named = list[tuple[str, Tensor]]


class LoadableModel(Protocol):
    """Model with a weight loader that knows where each checkpoint tensor belongs."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object: ...

    def parameters(self) -> Iterable[nn.Parameter]: ...


@dataclass(frozen=True, eq=False)
class _Copy:
    """Recorded copy: a strided part of a checkpoint tensor, and the part of a model parameter that it is copied to."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the start of the checkpoint tensor to the start of the part."""
    target: Tensor

    @property
    def is_dense(self) -> bool:
        """True if the part is contiguous."""
        return self.stride == torch.empty(self.size, device="meta").stride()

    def source(self, tensor: Tensor, start: int = 0) -> Tensor:
        """View of the part in its checkpoint tensor, or in a flat buffer where the checkpoint tensor starts at element
        `start`."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + start + self.offset)


class ReplayedLoad:
    """Loader that records the model's own loader once and then replays its copies.

    Pass all weights to `load` or `load_flat`, in any number of parts, then call `finish`. From the second time on the
    recorded copies are used.
    """

    def __init__(self, model: LoadableModel):
        self._model = model
        self._copies: dict[str, list[_Copy]] = {}
        self._flat_loads: dict[FlatLayout, _FlatLoad] = {}
        self._num_written = 0
        """Elements of parameters that recorded copies and padding have covered."""
        self.is_known = False
        """True if the recording covers every element of the model's parameters. Only then can the model's loader be
        skipped."""

    @torch.no_grad()
    def load(self, named: Named) -> None:
        """Load some named tensors, by the model's loader or by the recorded copies."""
        if not self.is_known:
            with _CopyRecorder(named, self):
                self._model.load_weights(iter(named))
            return
        _copy_all([(copy.target, copy.source(tensor)) for name, tensor in named for copy in self._copies.get(name, ())])

    @torch.no_grad()
    def load_flat(self, flat: Tensor, layout: FlatLayout) -> None:
        """Load tensors stored in flat bytes. Copies of a layout seen before are cached, since slicing out each tensor
        takes as long as all copies."""
        known = self._flat_loads.get(layout)
        if known is None and self.is_known and len({entry.dtype for entry in layout.entries}) == 1:
            known = self._flat_loads[layout] = _FlatLoad(layout, self._copies)
        if known is None:
            self.load(list(split_flat(flat, layout.entries, layout.starts)))
        else:
            known.copy(flat)

    def finish(self) -> None:
        """End a load after all weights were passed. Discard the recording if it does not cover the whole model."""
        if not self.is_known:
            self.is_known = self._num_written == sum(parameter.numel() for parameter in self._model.parameters())
            if not self.is_known:
                self._copies = {}
            self._num_written = 0

    def record_copy(self, name: str, copy: _Copy) -> None:
        """Record that the loader copied part of tensor `name`."""
        self._copies.setdefault(name, []).append(copy)
        self._num_written += copy.target.numel()

    def record_padding(self, target: Tensor) -> None:
        """Record that the loader filled padding with a constant, which later loads leave as it is."""
        self._num_written += target.numel()


class _FlatLoad:
    """Recorded copies from one flat layout of a single dtype. On a GPU nearly all of them run in one launch."""

    def __init__(self, layout: FlatLayout, copies_by_name: Mapping[str, list[_Copy]]):
        self._dtype: torch.dtype = getattr(torch, layout.entries[0].dtype)
        copies = [
            (copy, start // self._dtype.itemsize)
            for entry, start in zip(layout.entries, layout.starts, strict=True)
            for copy in copies_by_name.get(entry.name, ())
        ]
        self._launches: list[Callable[[Tensor], None]] = []
        self._single_copies = copies
        """Copies that no launch includes, each with the element at which its checkpoint tensor starts."""
        if any(copy.target.is_cuda for copy, _ in copies):
            from roll_core.inference.vllm.copy_kernel import CopyTable, FlatCopy  # needs Triton

            flat = {index: FlatCopy(start + copy.offset, copy.target) for index, (copy, start) in enumerate(copies)}
            launchable = {index: one for index, one in flat.items() if copies[index][0].is_dense and one.is_aligned}
            for dtype in {one.target.dtype for one in launchable.values()}:
                table = CopyTable([one for one in launchable.values() if one.target.dtype is dtype])
                self._launches.append(table.copy)
            self._single_copies = [pair for index, pair in enumerate(copies) if index not in launchable]

    def copy(self, flat: Tensor) -> None:
        """Copy all tensors from flat bytes into the model."""
        elements = flat[: len(flat) // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        for launch in self._launches:
            launch(elements)
        _copy_all([(copy.target, copy.source(elements, start)) for copy, start in self._single_copies])


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to its target in one batched call."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))


class _CopyRecorder(TorchDispatchMode):
    """Dispatch mode that sees every operation of the model's loader and records direct copies from the given tensors.

    Other writes stay unrecorded. Then the recording does not cover the whole model, and the loader is used again next time.
    """

    def __init__(self, named: Named, load: ReplayedLoad):
        super().__init__()
        self._load = load
        self._named = sorted(named, key=lambda one: one[1].data_ptr())
        self._addresses = [tensor.data_ptr() for _, tensor in self._named]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.copy_.default:
            target, source = args[:2]
            found = self._locate(source)
            if found is not None and target.shape == source.shape:
                name, offset = found
                self._load.record_copy(name, _Copy(tuple(source.shape), source.stride(), offset, target.detach()))
        elif function is torch.ops.aten.fill_.Scalar:
            self._load.record_padding(args[0])
        return result

    def _locate(self, source: Tensor) -> tuple[str, int] | None:
        """Name of the given tensor that `source` is part of, and the element at which `source` starts; None if there is
        none."""
        index = bisect.bisect_right(self._addresses, source.data_ptr()) - 1
        if index < 0:
            return None
        name, tensor = self._named[index]
        distance = source.data_ptr() - tensor.data_ptr()
        if distance >= tensor.nbytes or source.dtype != tensor.dtype:
            return None
        return name, distance // tensor.itemsize
