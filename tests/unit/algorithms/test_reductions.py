"""Reductions of token losses to one number: by hand, and invariants under splitting and masking of a batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll_core.algorithms import reductions
from roll_core.algorithms.inputs import LossInputs
from tests.unit.algorithms.builders_losses import (
    REDUCTIONS,
    gradient,
    layouts,
    loss_inputs,
    random_loss_inputs,
    seeds,
    selected,
)

every_reduction = pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)


def random_values(seed: int, inputs: LossInputs) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(inputs.mask_N), generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize(
    ("name", "whole", "masked"),
    [
        # sequences (1, 2, 3) and (10); then with the 2 masked, which still counts in the denominators
        ("token_mean", 16 / 4, 14 / 4),
        ("sequence_mean_token_sum", (6 + 10) / 2, (4 + 10) / 2),
        ("sequence_mean_token_mean", (6 / 3 + 10) / 2, (4 / 3 + 10) / 2),
        ("fixed_length", (6 / 7 + 10 / 7) / 2, (4 / 7 + 10 / 7) / 2),
    ],
)
def test_reductions_over_two_sequences_of_three_and_one_tokens(name, whole, masked):
    values_N = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    inputs = loss_inputs(policy=[0.0] * 4, layout=((2, 1), (1,)))
    assert REDUCTIONS[name](values_N, inputs).item() == pytest.approx(whole)
    inputs = replace(inputs, mask_N=torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    assert REDUCTIONS[name](values_N, inputs).item() == pytest.approx(masked)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [1 / 8] * 4),
        ("sequence_mean_token_sum", [1 / 4] * 4),
        ("sequence_mean_token_mean", [1 / 12] * 3 + [1 / 4]),
        ("fixed_length", [1 / 28] * 4),
    ],
)
def test_the_weight_of_each_token_in_a_batch_of_eight_tokens_and_four_sequences(name, expected):
    inputs = loss_inputs(policy=[0.0] * 4, layout=((3,), (1,)), global_tokens=8.0, global_sequences=4.0)
    values_N = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    assert gradient(REDUCTIONS[name](values_N, inputs), values_N).tolist() == pytest.approx(expected)


@every_reduction
@given(seed=seeds, layout=layouts, data=st.data())
@settings(max_examples=50, deadline=None)
def test_reductions_of_parts_add_up_to_the_whole(reduce, seed, layout, data):
    inputs = random_loss_inputs(seed, layout, masked_share=0.3)
    values_N = random_values(seed, inputs)
    inputs = replace(inputs, entropies_N=values_N)  # so that each part takes its own values along
    order = data.draw(st.permutations(range(len(layout))))
    cut = data.draw(st.integers(0, len(order)))
    parts = [selected(inputs, part) for part in (order[:cut], order[cut:]) if part]
    total, whole = sum(reduce(part.entropies_N, part) for part in parts), reduce(values_N, inputs)
    assert torch.allclose(total, whole, atol=1e-12)
    assert torch.allclose(*(gradient(loss, values_N) for loss in (total, whole)), atol=1e-12)


@every_reduction
@given(seed=seeds, layout=layouts)
@settings(max_examples=50, deadline=None)
def test_a_masked_value_has_no_gradient_and_the_others_keep_theirs(reduce, seed, layout):
    inputs = random_loss_inputs(seed, layout, masked_share=0.5)
    values_N = random_values(seed, inputs)
    masked_N = gradient(reduce(values_N, inputs), values_N)
    whole_N = gradient(reduce(values_N, replace(inputs, mask_N=torch.ones_like(inputs.mask_N))), values_N)
    assert torch.equal(masked_N, whole_N * inputs.mask_N)
    assert (whole_N > 0).all()


@given(seed=seeds, count=st.integers(1, 4), length=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_with_sequences_of_one_length_all_reductions_are_the_token_mean_up_to_that_length(seed, count, length):
    inputs = random_loss_inputs(seed, [[length]] * count, masked_share=0.3)
    values_N = random_values(seed, inputs)
    expected = reductions.token_mean(values_N, inputs)
    assert torch.allclose(reductions.sequence_mean_token_mean(values_N, inputs), expected)
    assert torch.allclose(reductions.sequence_mean_token_sum(values_N, inputs) / length, expected)
    assert torch.allclose(reductions.fixed_length(values_N, inputs, length=length), expected)


@given(seed=seeds, layout=layouts, length=st.integers(1, 4096))
@settings(max_examples=50, deadline=None)
def test_the_fixed_length_only_scales_the_sum_over_tokens(seed, layout, length):
    inputs = random_loss_inputs(seed, layout, masked_share=0.3)
    values_N = random_values(seed, inputs)
    scaled = length * reductions.fixed_length(values_N, inputs, length=length)
    assert torch.allclose(scaled, reductions.sequence_mean_token_sum(values_N, inputs))
