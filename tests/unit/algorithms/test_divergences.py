"""Estimators of the KL divergence: by hand, and against the exact sum over a small vocabulary. Shapes: V vocabulary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll_core.algorithms.divergences import MAX_LOG_RATIO, absolute, full, k1, k2, k3
from tests.unit.algorithms.builders_losses import gradient, seeds

LOG_2 = math.log(2.0)
logprobs = st.floats(-20, 0)
every_estimator = pytest.mark.parametrize("estimator", [k1, k2, k3, absolute])


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def random_logits(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, other = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return policy.clone().requires_grad_(), other


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = log 2, then -log 2, then 0
        (k1, [LOG_2, -LOG_2, 0.0]),
        (k2, [LOG_2**2 / 2, LOG_2**2 / 2, 0.0]),
        (k3, [0.5 + LOG_2 - 1, 2.0 - LOG_2 - 1, 0.0]),
        (absolute, [LOG_2, LOG_2, 0.0]),
    ],
)
def test_estimates_by_hand(estimator, expected):
    policy_N = torch.tensor([-1.0, -1 - LOG_2, -3.0], dtype=torch.float64)
    other_N = torch.tensor([-1 - LOG_2, -1.0, -3.0], dtype=torch.float64)
    assert estimator(policy_N, other_N).tolist() == pytest.approx(expected)


def test_the_full_divergence_by_hand():
    # (1/2, 1/2) against (1/4, 3/4): 1/2 log 2 + 1/2 log(2/3) = 0.143841; and against itself: 0
    policy_NV = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64).log()
    other_NV = torch.tensor([[0.25, 0.75], [0.25, 0.75]], dtype=torch.float64).log()
    assert full(policy_NV, other_NV).tolist() == pytest.approx([0.143841, 0.0], abs=1e-6)


@given(policy=logprobs, other=logprobs)
@settings(max_examples=50, deadline=None)
def test_all_but_k1_are_never_negative(policy, other):
    for estimator in (k2, k3, absolute):
        assert estimator(scalar(policy), scalar(other)).item() >= -1e-12


@given(policy=st.floats(-1e6, 0), other=st.floats(-1e6, 0))
@settings(max_examples=50, deadline=None)
def test_k3_stays_within_its_bound_however_far_apart_the_policies_are(policy, other):
    assert k3(scalar(policy), scalar(other)).item() <= math.exp(MAX_LOG_RATIO) - MAX_LOG_RATIO - 1 + 1e-6


@given(policy=logprobs, other=logprobs)
@settings(max_examples=50, deadline=None)
def test_swapping_the_policies_changes_the_sign_of_k1_and_nothing_of_k2_and_the_absolute(policy, other):
    policy, other = scalar(policy), scalar(other)
    assert k1(policy, other) == -k1(other, policy)
    assert k2(policy, other) == k2(other, policy)
    assert absolute(policy, other) == absolute(other, policy)


@every_estimator
@given(value=logprobs)
@settings(max_examples=50, deadline=None)
def test_a_policy_does_not_diverge_from_itself(estimator, value):
    assert estimator(scalar(value), scalar(value)).item() == 0.0


@given(value=logprobs, distance=st.floats(-1e-3, 1e-3))
@settings(max_examples=50, deadline=None)
def test_near_the_reference_k2_and_k3_agree(value, distance):
    # they differ by d^3 / 6 and less
    difference = k3(scalar(value + distance), scalar(value)) - k2(scalar(value + distance), scalar(value))
    assert abs(difference.item()) <= abs(distance) ** 3 / 6 + 1e-12


@pytest.mark.parametrize("estimator", [k1, k3])
@given(seed=seeds)
@settings(max_examples=50, deadline=None)
def test_k1_and_k3_have_the_full_divergence_as_their_mean(estimator, seed):
    policy_V, other_V = (logits.log_softmax(-1) for logits in random_logits(seed, 6))
    mean = (policy_V.exp() * estimator(policy_V, other_V)).sum()
    assert torch.allclose(mean, full(policy_V, other_V))


@given(seed=seeds)
@settings(max_examples=50, deadline=None)
def test_as_a_loss_k2_has_the_gradient_of_the_divergence_and_k1_none(seed):
    logits_V, other_V = random_logits(seed, 6)
    policy_V, other_V = logits_V.log_softmax(-1), other_V.log_softmax(-1)
    chances_V = policy_V.exp().detach()  # the sampling itself has no gradient in a loss
    expected_V = gradient(full(policy_V, other_V), logits_V)
    of_k2_V, of_k1_V = (
        gradient((chances_V * estimator(logits_V.log_softmax(-1), other_V)).sum(), logits_V) for estimator in (k2, k1)
    )
    assert torch.allclose(of_k2_V, expected_V)
    assert torch.allclose(of_k1_V, torch.zeros_like(of_k1_V), atol=1e-12)


@given(seed=seeds)
@settings(max_examples=50, deadline=None)
def test_the_full_divergence_is_positive_and_the_same_as_pytorchs(seed):
    policy_NV, other_NV = (logits.log_softmax(-1) for logits in random_logits(seed, 3, 5))
    expected_N = torch.nn.functional.kl_div(other_NV, policy_NV, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(full(policy_NV, other_NV), expected_N)
    assert (full(policy_NV, other_NV) > 0).all()
