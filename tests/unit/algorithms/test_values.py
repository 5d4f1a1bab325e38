"""Critic's loss: by hand, and against the squared error that it bounds."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.inputs import ValueInputs
from roll_core.algorithms.values import clipped_value_loss
from tests.unit.algorithms.builders_losses import gradient, random_value_inputs, seeds, value_inputs

clips = st.one_of(st.none(), st.floats(0.01, 2.0))


def part_of(inputs: ValueInputs, tokens: list[int]) -> ValueInputs:
    return replace(
        inputs, **{name: value[tokens] for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    )


def test_the_larger_of_the_two_errors_counts():
    # one: 1 from 0 towards 2: (1 - 2)^2 = 1, but at 0.2 (0.2 - 2)^2 = 3.24, which no step can lower
    # two: -1 from 0 away from 2: (-1 - 2)^2 = 9 beats (-0.2 - 2)^2 = 4.84
    # three: 0.1 from 0, within the clip: (0.1 - 2)^2 = 3.61
    inputs = value_inputs(values=[1.0, -1.0, 0.1], old_values=[0.0] * 3, returns=[2.0] * 3)
    outputs = clipped_value_loss(inputs, value_clip=0.2)
    assert outputs.loss.item() == pytest.approx((3.24 + 9 + 3.61) / 2 / 3)
    assert gradient(outputs.loss, inputs.values_N).tolist() == pytest.approx([0.0, -3.0 / 3, -1.9 / 3])


def test_without_a_clip_only_the_error_counts():
    inputs = value_inputs(values=[1.0, -1.0], old_values=[0.0] * 2, returns=[2.0] * 2, global_tokens=4.0)
    outputs = clipped_value_loss(inputs, value_clip=None)
    assert outputs.loss.item() == pytest.approx((1 + 9) / 2 / 4)
    assert gradient(outputs.loss, inputs.values_N).tolist() == pytest.approx([-1 / 4, -3 / 4])


def test_metrics_are_sums_over_the_tokens_that_count():
    inputs = value_inputs(values=[1.0, 5.0, 3.0], old_values=[0.0] * 3, returns=[2.0, 7.0, 9.0], mask=[1.0, 1.0, 0.0])
    sums = clipped_value_loss(inputs, value_clip=0.2).metric_sums
    # clipped: (0.2 - 2)^2 > 1 and (0.2 - 7)^2 > 4
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {"critic/clip_fraction": 2.0, "critic/value": 6.0, "critic/return": 9.0, "critic/squared_error": 5.0}
    )


@given(seed=seeds, share=st.floats(0.0, 0.5))
@settings(max_examples=50, deadline=None)
def test_without_a_clip_it_is_half_the_mean_squared_error(seed, share):
    inputs = random_value_inputs(seed, masked_share=share)
    loss = clipped_value_loss(inputs, value_clip=None).loss
    expected = ((inputs.values_N - inputs.returns_N).square() * inputs.mask_N).sum() / 2 / inputs.global_tokens
    assert torch.allclose(loss, expected)
    assert torch.allclose(*(gradient(each, inputs.values_N) for each in (loss, expected)))


@given(seed=seeds, clip=st.floats(0.01, 2.0))
@settings(max_examples=50, deadline=None)
def test_a_clip_never_lowers_the_loss_nor_adds_gradient(seed, clip):
    inputs = random_value_inputs(seed)
    clipped, plain = (clipped_value_loss(inputs, value_clip=each).loss for each in (clip, None))
    clipped_N, plain_N = (gradient(loss, inputs.values_N) for loss in (clipped, plain))
    assert clipped >= plain
    assert ((clipped_N == 0) | torch.isclose(clipped_N, plain_N)).all()


@given(seed=seeds)
@settings(max_examples=50, deadline=None)
def test_values_that_have_moved_less_than_the_clip_are_not_counted_as_clipped(seed):
    # old + (value - old) is not always value: rounding must not look like clipping
    inputs = random_value_inputs(seed, count=30)
    furthest = (inputs.values_N - inputs.old_values_N).abs().max().item()
    outputs = clipped_value_loss(inputs, value_clip=1.001 * furthest)
    assert outputs.metric_sums["critic/clip_fraction"] == 0
    assert torch.equal(outputs.loss, clipped_value_loss(inputs, value_clip=None).loss)


@given(seed=seeds, clip=clips)
@settings(max_examples=50, deadline=None)
def test_a_masked_value_has_no_gradient_and_the_others_keep_theirs(seed, clip):
    masked = random_value_inputs(seed, masked_share=0.5)
    whole = replace(masked, mask_N=torch.ones_like(masked.mask_N))
    masked_N, whole_N = (
        gradient(clipped_value_loss(inputs, value_clip=clip).loss, masked.values_N) for inputs in (masked, whole)
    )
    assert torch.equal(masked_N, whole_N * masked.mask_N)


@given(seed=seeds, clip=clips, order=st.permutations(range(9)), cut=st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_no_way_of_cutting_a_batch_changes_loss_gradient_or_metrics(seed, clip, order, cut):
    inputs = random_value_inputs(seed, masked_share=0.3)
    parts = [clipped_value_loss(part_of(inputs, part), value_clip=clip) for part in (order[:cut], order[cut:])]
    whole = clipped_value_loss(inputs, value_clip=clip)
    total = sum(part.loss for part in parts)
    assert torch.allclose(total, whole.loss)
    assert torch.allclose(*(gradient(loss, inputs.values_N) for loss in (total, whole.loss)))
    for name, value in whole.metric_sums.items():
        assert torch.allclose(sum(part.metric_sums[name] for part in parts), value)
