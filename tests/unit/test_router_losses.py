"""Losses of routers: values and gradients worked by hand."""

import pytest
import torch
from torch import Tensor

from roll_core.batching.packing import PackingLimits
from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.training import Packing
from roll_core.training.experts.losses import RouterLosses, write_shares
from tests.micro_batches import cut
from tests.support import random_samples

CHOSEN = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 1], [0, 1, 1]])
WEIGHTS = torch.tensor([0.25, 0.0, 0.5, 0.25])
SHARES = torch.tensor([0.75, 0.5, 0.75]) / 2  # weighted share of the choices that each expert gets; every token chooses two


def losses(balance: float, z: float) -> RouterLosses:
    return RouterLosses(ExpertsConfig(balance_loss=balance, z_loss=z), 1, 3, torch.device("cpu"), scale=2.0)


def logits() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradient(found: RouterLosses, logits_tE: Tensor, rows: slice) -> Tensor:
    """Gradient of the losses of some tokens with respect to all logits; the gates keep their own gradient."""
    gates = torch.zeros(len(logits_tE[rows])).requires_grad_()
    attached = found.attach(0, gates, logits_tE[rows], CHOSEN[rows], WEIGHTS[rows])
    assert torch.equal(attached, gates)
    attached.sum().backward()
    assert torch.equal(gates.grad, torch.ones_like(gates))
    taken, logits_tE.grad = logits_tE.grad, None
    return torch.zeros_like(logits_tE) if taken is None else taken


def test_metrics_are_the_losses_over_all_micro_batches_of_a_step():
    found, logits_tE = losses(0.1, 0.1), logits()
    for rows in (slice(0, 1), slice(1, 4)):
        gradient(found, logits_tE, rows)
    balance = 3 * (SHARES * (WEIGHTS @ logits_tE.softmax(dim=1))).sum()
    z = WEIGHTS @ logits_tE.logsumexp(dim=1).square()
    assert found.metrics() == pytest.approx({"experts/balance_loss": balance.item(), "experts/z_loss": z.item()})
    assert found.metrics() == {}  # no tokens since the last call


def test_gradients_of_a_step_use_the_shares_of_the_step_before_and_add_up_over_micro_batches():
    found, logits_tE = losses(0.3, 0.0), logits()
    assert not gradient(found, logits_tE, slice(0, 4)).any()  # the first step
    found.metrics()
    (wanted,) = torch.autograd.grad(2.0 * 0.3 * 3 * (SHARES * (WEIGHTS @ logits_tE.softmax(dim=1))).sum(), logits_tE)
    torch.testing.assert_close(gradient(found, logits_tE, slice(0, 4)), wanted)
    torch.testing.assert_close(gradient(found, logits_tE, slice(0, 3)) + gradient(found, logits_tE, slice(3, 4)), wanted)


def test_the_z_loss_has_gradients_from_the_first_step_on():
    found, logits_tE = losses(0.0, 0.3), logits()
    (wanted,) = torch.autograd.grad(2.0 * 0.3 * (WEIGHTS @ logits_tE.logsumexp(dim=1).square()), logits_tE)
    torch.testing.assert_close(gradient(found, logits_tE, slice(0, 4)), wanted)


def test_shares_survive_a_checkpoint_and_a_checkpoint_may_have_none(tmp_path):
    found, logits_tE = losses(0.3, 0.0), logits()
    assert write_shares(found.shares, tmp_path) == []
    gradient(found, logits_tE, slice(0, 4))
    found.metrics()
    assert write_shares(found.shares, tmp_path)
    another = losses(0.3, 0.0)
    another.load(tmp_path)
    assert torch.equal(gradient(another, logits_tE, slice(0, 4)), gradient(found, logits_tE, slice(0, 4)))
    another.load(tmp_path / "nothing")
    assert not gradient(another, logits_tE, slice(0, 4)).any()


def test_router_losses_are_not_rounded_under_autocast():
    plain, rounded, logits_tE = losses(0.3, 0.3), losses(0.3, 0.3), logits()
    gradient(plain, logits_tE, slice(0, 4))
    with torch.autocast("cpu", torch.bfloat16):
        gradient(rounded, logits_tE, slice(0, 4))
        assert rounded.metrics() == plain.metrics()
        found = gradient(rounded, logits_tE, slice(0, 4))
    assert torch.equal(found, gradient(plain, logits_tE, slice(0, 4)))


@pytest.mark.parametrize("packing", Packing)
def test_every_trained_token_counts_once_however_rows_are_packed_and_padding_never(packing):
    samples = random_samples(9)
    for part in cut(samples, PackingLimits(60, 30, packing, width_multiple=8)):
        notes_RT = part.routing_notes()[..., 0]
        assert torch.equal(notes_RT == -1, part.segment_RT == 0)
        assert notes_RT.clamp(min=0).sum() == len(part.token_index_N)
        assert (notes_RT.flatten()[part.predicted_by_N] > 0).all()
