"""Replayed load: the copies that a model's loader made are recorded once and repeated without the loader."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from roll_core.inference.vllm.replayed_load import ReplayedLoad
from roll_core.weights.buckets import FlatLayout, TensorEntry, starts_of


class Fused(nn.Module):
    """Model whose loader does what engines do: fuses q and k into one bfloat16 matrix, keeps the gate rows of the second of
    two ranks, and pads the end of an embedding. With a scale the loader computes values, which cannot be replayed."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.qk = nn.Parameter(torch.full((6, 3), -1.0, dtype=torch.bfloat16))
        self.gate = nn.Parameter(torch.full((2, 3), -1.0))
        self.embedding = nn.Parameter(torch.full((8, 3), -1.0))
        self.num_calls = 0
        self._scale = scale

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.num_calls += 1
        for name, tensor in weights:
            match name:
                case "q":
                    self.qk.data[:4].copy_(tensor)
                case "k":
                    self.qk.data[4:].copy_(tensor if self._scale == 1.0 else tensor * self._scale)
                case "gate":
                    self.gate.data.copy_(tensor.narrow(0, 2, 2))
                case "embedding":
                    self.embedding.data[:7].copy_(tensor)
                    self.embedding.data[7:].fill_(0)


def weights(seed: int) -> list[tuple[str, Tensor]]:
    """Random tensors by name, all of them views of one flat tensor."""
    torch.manual_seed(seed)
    flat = torch.randn(100)
    sizes = {"q": (4, 3), "k": (2, 3), "gate": (4, 3), "embedding": (7, 3)}
    named_tensors, start = [], 5
    for name, (rows, columns) in sizes.items():
        named_tensors.append((name, flat[start : start + rows * columns].view(rows, columns)))
        start += rows * columns + 1
    return named_tensors


def in_flat(named: list[tuple[str, Tensor]]) -> tuple[Tensor, FlatLayout]:
    """Flat bytes that the tensors are views of, and the layout of the tensors in them."""
    whole = torch.empty(0, dtype=torch.uint8).set_(named[0][1].untyped_storage())
    entries = tuple(TensorEntry(name, tuple(tensor.shape), "float32") for name, tensor in named)
    return whole, FlatLayout(entries, tuple(4 * tensor.storage_offset() for _, tensor in named))


def loaded(seed: int) -> dict[str, Tensor]:
    """Parameters after the loader itself has loaded the weights of this seed."""
    expected = Fused()
    expected.load_weights(weights(seed))
    return dict(expected.named_parameters())


@pytest.mark.parametrize("num_parts", [1, 4])
def test_weights_are_copied_to_where_the_loader_put_them_without_calling_it_again(num_parts):
    model = Fused()
    replayed = ReplayedLoad(model)
    for seed in range(3):
        named = weights(seed)
        for part in range(num_parts):
            replayed.load(named[part::num_parts])
        replayed.finish()
        assert all(torch.equal(tensor, loaded(seed)[name]) for name, tensor in model.named_parameters())
    assert model.num_calls == num_parts


@pytest.mark.parametrize("num_parts", [1, 4])
def test_flat_weights_are_copied_to_the_same_parameters_even_if_their_layout_changes_later(num_parts):
    model = Fused()
    replayed = ReplayedLoad(model)
    for seed in range(6):
        named = weights(seed)
        if seed >= 3:  # in another order, and closer together
            named = list(zip(["gate", "q", "embedding", "k"], [named[i][1] for i in (2, 0, 3, 1)], strict=True))
            flat = torch.cat([torch.zeros(1), *(tensor.flatten() for _, tensor in named)])
            parts = flat[1:].split([tensor.numel() for _, tensor in named])
            named = [(name, part.view(tensor.shape)) for (name, tensor), part in zip(named, parts, strict=True)]
        for part in range(num_parts):
            replayed.load_flat(*in_flat(named[part::num_parts]))
        replayed.finish()
        assert all(torch.equal(tensor, loaded(seed)[name]) for name, tensor in model.named_parameters())
    assert model.num_calls == num_parts


def test_a_flat_tensor_may_hold_several_dtypes():
    model = Fused()
    replayed = ReplayedLoad(model)
    for seed in range(3):
        (_, q), *rest = weights(seed)
        flat = torch.cat([q.double().flatten().view(torch.uint8), *(t.flatten().view(torch.uint8) for _, t in rest)])
        entries = (TensorEntry("q", (4, 3), "float64"), *(TensorEntry(n, tuple(t.shape), "float32") for n, t in rest))
        replayed.load_flat(flat, FlatLayout(entries, starts_of(entries)))
        replayed.finish()
        assert all(torch.equal(tensor, loaded(seed)[name]) for name, tensor in model.named_parameters())


def test_a_loader_that_computes_is_called_every_time():
    model = Fused(scale=2.0)
    replayed = ReplayedLoad(model)
    for seed in range(3):
        replayed.load(weights(seed))
        replayed.finish()
        assert torch.equal(model.qk[4:], (loaded(seed)["qk"][4:].float() * 2.0).bfloat16())
    assert model.num_calls == 3


def test_the_loader_stays_in_use_until_every_tensor_was_loaded_once():
    model = Fused()
    replayed = ReplayedLoad(model)
    replayed.load(weights(0)[:3])
    replayed.finish()
    replayed.load(weights(1))
    replayed.finish()
    replayed.load(weights(2))
    assert all(torch.equal(tensor, loaded(2)[name]) for name, tensor in model.named_parameters())
    assert model.num_calls == 2
