"""Preference losses: values worked by hand, and how they depend on the margin between chosen and rejected."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll_core.algorithms.preferences import (
    PreferenceInputs,
    direct_preference,
    identity_preference,
    preference_accuracy,
)
from tests.unit.algorithms.builders_losses import gradient, preference_inputs, random_preference_inputs, seeds

betas = st.floats(0.05, 2.0)
shares = st.floats(0.0, 0.5)


def margins(inputs: PreferenceInputs) -> Tensor:
    return (inputs.chosen_logprobs_P - inputs.chosen_reference_P) - (
        inputs.rejected_logprobs_P - inputs.rejected_reference_P
    )


def swapped(inputs: PreferenceInputs) -> PreferenceInputs:
    return PreferenceInputs(
        chosen_logprobs_P=inputs.rejected_logprobs_P,
        rejected_logprobs_P=inputs.chosen_logprobs_P,
        chosen_reference_P=inputs.rejected_reference_P,
        rejected_reference_P=inputs.chosen_reference_P,
        global_pairs=inputs.global_pairs,
    )


def part_of(inputs: PreferenceInputs, pairs: list[int]) -> PreferenceInputs:
    return replace(inputs, **{name: value[pairs] for name, value in vars(inputs).items() if isinstance(value, Tensor)})


def with_margin_two(global_pairs: float = 1.0) -> PreferenceInputs:
    """One pair with the margin h = (-1 + 2) - (-3 + 2) = 2."""
    return preference_inputs(
        chosen=[-1.0], rejected=[-3.0], chosen_reference=[-2.0], rejected_reference=[-2.0], global_pairs=global_pairs
    )


def test_direct_preference_by_hand():
    # beta h = 1: log(1 + e^-1) = 0.313262; gradient -beta sigmoid(-1) = -0.5 * 0.268941, over two pairs half of it
    inputs = with_margin_two(global_pairs=2.0)
    loss = direct_preference(inputs, beta=0.5)
    assert loss.item() == pytest.approx(0.313262 / 2, abs=1e-6)
    assert gradient(loss, inputs.chosen_logprobs_P).item() == pytest.approx(-0.134471 / 2, abs=1e-6)
    assert gradient(loss, inputs.rejected_logprobs_P).item() == pytest.approx(0.134471 / 2, abs=1e-6)


def test_label_smoothing_takes_a_share_of_the_labels_to_be_wrong():
    # 0.9 * log(1 + e^-1) + 0.1 * log(1 + e) = 0.9 * 0.313262 + 0.1 * 1.313262
    loss = direct_preference(with_margin_two(), beta=0.5, label_smoothing=0.1)
    assert loss.item() == pytest.approx(0.413262, abs=1e-6)


def test_identity_preference_by_hand():
    # (2 - 1 / (2 * 0.5))^2 = 1; gradient 2 * (2 - 1) = 2; with beta 0.1: (2 - 5)^2 = 9
    inputs = with_margin_two()
    loss = identity_preference(inputs, beta=0.5)
    assert loss.item() == pytest.approx(1.0)
    assert gradient(loss, inputs.chosen_logprobs_P).item() == pytest.approx(2.0)
    assert identity_preference(inputs, beta=0.1).item() == pytest.approx(9.0)


def test_accuracy_counts_the_pairs_the_policy_orders_better_than_the_reference():
    # margins 2, 0 and -1: only the first
    inputs = preference_inputs(
        chosen=[-1.0, -1.0, -2.0],
        rejected=[-3.0, -1.0, -1.0],
        chosen_reference=[-2.0, -1.0, -1.0],
        rejected_reference=[-2.0, -1.0, -1.0],
    )
    assert preference_accuracy(inputs).item() == 1.0


@given(seed=seeds, beta=betas, share=shares)
@settings(max_examples=50, deadline=None)
def test_smoothed_labels_are_a_mixture_of_the_losses_of_both_orders(seed, beta, share):
    inputs = random_preference_inputs(seed)
    smoothed = direct_preference(inputs, beta=beta, label_smoothing=share)
    right, wrong = (direct_preference(each, beta=beta) for each in (inputs, swapped(inputs)))
    assert torch.allclose(smoothed, (1 - share) * right + share * wrong)


@given(seed=seeds, beta=betas, shift=st.floats(-5, 5))
@settings(max_examples=50, deadline=None)
def test_a_shift_of_both_policy_and_reference_does_not_count(seed, beta, shift):
    inputs = random_preference_inputs(seed)
    shifted = replace(
        inputs,
        chosen_logprobs_P=inputs.chosen_logprobs_P + shift,
        chosen_reference_P=inputs.chosen_reference_P + shift,
    )
    assert torch.allclose(direct_preference(inputs, beta=beta), direct_preference(shifted, beta=beta))
    assert torch.allclose(identity_preference(inputs, beta=beta), identity_preference(shifted, beta=beta))


@given(seed=seeds, beta=betas)
@settings(max_examples=50, deadline=None)
def test_direct_preference_pushes_hardest_where_the_order_is_most_wrong(seed, beta):
    inputs = random_preference_inputs(seed)
    push_P = -gradient(direct_preference(inputs, beta=beta), inputs.chosen_logprobs_P) * inputs.global_pairs
    assert torch.allclose(push_P, beta * torch.sigmoid(-beta * margins(inputs)))


@given(seed=seeds, beta=betas)
@settings(max_examples=50, deadline=None)
def test_identity_preference_has_no_loss_at_its_target_margin(seed, beta):
    inputs = random_preference_inputs(seed)
    at_target = replace(inputs, chosen_reference_P=inputs.chosen_reference_P + (margins(inputs) - 1 / (2 * beta)).detach())
    loss = identity_preference(at_target, beta=beta)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert torch.allclose(gradient(loss, inputs.chosen_logprobs_P), torch.zeros_like(inputs.chosen_reference_P), atol=1e-9)


@given(seed=seeds)
@settings(max_examples=50, deadline=None)
def test_every_pair_is_ordered_one_way_or_the_other(seed):
    inputs = random_preference_inputs(seed)
    assert preference_accuracy(inputs) + preference_accuracy(swapped(inputs)) == inputs.global_pairs


@given(seed=seeds, beta=betas, share=shares, order=st.permutations(range(5)), cut=st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_no_way_of_cutting_a_batch_changes_loss_gradient_or_accuracy(seed, beta, share, order, cut):
    inputs = random_preference_inputs(seed)
    parts = [part_of(inputs, part) for part in (order[:cut], order[cut:])]
    for loss_of in (
        lambda each: direct_preference(each, beta=beta, label_smoothing=share),
        lambda each: identity_preference(each, beta=beta),
    ):
        total, whole = sum(loss_of(part) for part in parts), loss_of(inputs)
        assert torch.allclose(total, whole)
        assert torch.allclose(*(gradient(loss, inputs.chosen_logprobs_P) for loss in (total, whole)))
    assert sum(preference_accuracy(part) for part in parts) == preference_accuracy(inputs)
