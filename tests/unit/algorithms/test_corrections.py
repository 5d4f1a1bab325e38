"""Corrections for the mismatch between sampler and trainer: ratios, filters, the veto, and their metrics."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.corrections import (
    WEIGHT,
    WEIGHT_SQUARED,
    correct,
    importance_ratio,
    is_kept,
    is_not_vetoed,
    probability_difference,
    with_effective_sample_size,
)
from roll_core.algorithms.inputs import LossInputs
from roll_core.algorithms.losses import policy_gradient, policy_loss
from roll_core.algorithms.reductions import token_mean
from roll_core.config.algorithm.correction import Compared, CorrectionLevel, FilterConfig, WeightingConfig
from tests.unit.algorithms.builders_losses import (
    CORRECTIONS,
    correction,
    gradient,
    layouts,
    loss_inputs,
    random_loss_inputs,
    seeds,
)

LOG_2 = math.log(2.0)
levels = st.sampled_from(list(CorrectionLevel))


def with_ratios(ratios: list[float], **changes) -> LossInputs:
    """Loss inputs with the given ratios anchor / sampler; anchor probabilities are 1."""
    return loss_inputs(
        policy=[-1.0] * len(ratios), anchor=[0.0] * len(ratios), sampler=[-math.log(ratio) for ratio in ratios], **changes
    )


# By hand


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # turns of tokens (2, 8) and (1/4)
        (CorrectionLevel.TOKEN, [2.0, 8.0, 0.25]),
        (CorrectionLevel.SEGMENT, [4.0, 4.0, 0.25]),  # sqrt(2 * 8)
        (CorrectionLevel.GEOMETRIC, [4 ** (1 / 3)] * 3),  # (2 * 8 / 4)^(1/3)
        (CorrectionLevel.SEQUENCE, [4.0] * 3),  # 2 * 8 / 4
    ],
)
def test_the_ratio_of_each_level(level, expected):
    inputs = with_ratios([2.0, 8.0, 0.25], layout=((2, 1),))
    assert importance_ratio(inputs, level).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (CorrectionLevel.SEGMENT, [2.0, 2.0, 0.25]),
        (CorrectionLevel.GEOMETRIC, [0.5**0.5] * 3),  # sqrt(2 / 4)
        (CorrectionLevel.SEQUENCE, [0.5] * 3),  # 2 / 4
    ],
)
def test_a_token_removed_earlier_counts_in_no_mean_or_product(level, expected):
    inputs = with_ratios([2.0, 8.0, 0.25], layout=((2, 1),), mask=[1.0, 0.0, 1.0])
    assert importance_ratio(inputs, level).tolist() == pytest.approx(expected)


def test_the_ratio_of_a_long_sequence_is_bounded():
    inputs = with_ratios([2.0] * 100)  # 2^100 is bounded at e^10
    assert importance_ratio(inputs, CorrectionLevel.SEQUENCE).tolist() == pytest.approx([math.exp(10.0)] * 100)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (CorrectionLevel.TOKEN, [0.1, -0.2, 0.3]),
        (CorrectionLevel.SEGMENT, [-0.05, -0.05, 0.3]),  # (0.1 - 0.2) / 2
        (CorrectionLevel.GEOMETRIC, [0.2 / 3] * 3),
    ],
)
def test_the_difference_of_probabilities_of_each_level(level, expected):
    anchor, sampler = [0.5, 0.2, 0.9], [0.4, 0.4, 0.6]
    inputs = loss_inputs(
        policy=[0.0] * 3, anchor=list(map(math.log, anchor)), sampler=list(map(math.log, sampler)), layout=((2, 1),)
    )
    assert probability_difference(inputs, level).tolist() == pytest.approx(expected)


def test_a_filter_by_ratio_keeps_tokens_within_its_bounds():
    inputs = with_ratios([0.4, 0.6, 1.0, 4.9, 5.1])
    assert is_kept(inputs, FilterConfig()).tolist() == [False, True, True, True, False]  # IcePop: 0.5 to 5


def test_a_filter_by_difference_keeps_tokens_within_its_bounds():
    # 1 - 0.9, 1 - 0.7, 1 - 2: the ratio of the last, 0.5, would have passed
    inputs = with_ratios([1 / 0.9, 1 / 0.7, 0.5])
    each = FilterConfig(compared=Compared.DIFFERENCE, lower=-0.2, upper=0.2)
    assert is_kept(inputs, each).tolist() == [True, False, False]


def test_a_filter_by_sequence_removes_all_its_tokens():
    # products 0.8 * 0.5 = 0.4 and 2 * 3 = 6; each token alone would pass
    inputs = with_ratios([0.8, 0.5, 2.0, 3.0, 1.0], layout=((2,), (1, 1), (1,)))
    each = FilterConfig(level=CorrectionLevel.SEQUENCE)
    assert is_kept(inputs, each).tolist() == [False, False, False, False, True]


def test_the_veto_removes_the_whole_sequence_of_one_impossible_token():
    inputs = with_ratios([1.0, 1e-5, 50.0, 0.01], layout=((1, 1), (2,)))
    assert is_not_vetoed(inputs, 1e-4).tolist() == [False, False, True, True]


def test_a_token_removed_earlier_vetoes_nothing():
    inputs = with_ratios([1.0, 1e-5], mask=[1.0, 0.0])
    assert is_not_vetoed(inputs, 1e-4).tolist() == [True, True]


def test_weights_are_truncated_above_and_multiply_the_weights_there_are():
    inputs = with_ratios([0.5, 1.5, 8.0])
    inputs = replace(inputs, weights_N=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    corrected, sums = correction(level=CorrectionLevel.TOKEN, upper=2.0)(inputs)
    assert corrected.weights_N.tolist() == pytest.approx([0.5, 3.0, 6.0])
    assert sums["correction/kept"].item() == 3.0
    assert sums[WEIGHT].item() == pytest.approx(4.0)  # 0.5 + 1.5 + 2
    assert sums[WEIGHT_SQUARED].item() == pytest.approx(6.5)  # 0.25 + 2.25 + 4


def test_weights_without_an_upper_bound_are_the_ratios():
    corrected, _ = correction(level=CorrectionLevel.TOKEN, upper=None)(with_ratios([0.5, 8.0, 2000.0]))
    assert corrected.weights_N.tolist() == pytest.approx([0.5, 8.0, 2000.0])


def test_filters_and_veto_together_remove_every_token_that_one_of_them_removes():
    # token one: ratio 6; two: masked before; three: sequence with a ratio of 1e-6; five: kept
    inputs = with_ratios([6.0, 1.0, 1.0, 1e-6, 1.0], layout=((2,), (2,), (1,)), mask=[1.0, 0.0, 1.0, 1.0, 1.0])
    corrected, sums = correction(FilterConfig(lower=0.0, upper=5.0), veto_below=1e-4)(inputs)
    assert corrected.mask_N.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert sums["correction/kept"].item() == 1.0
    assert sums[WEIGHT].item() == 1.0


def test_effective_sample_size_by_hand():
    # weights 1, 1, 2: mean 4/3, mean square 2: 16/9 / 2 = 8/9
    metrics = with_effective_sample_size({WEIGHT: 4 / 3, WEIGHT_SQUARED: 2.0, "other": 5.0})
    assert metrics["correction/effective_sample_size"] == pytest.approx(8 / 9)
    assert metrics["other"] == 5.0


def test_without_a_correction_no_effective_sample_size_is_reported():
    assert with_effective_sample_size({"other": 5.0}) == {"other": 5.0}
    assert with_effective_sample_size({WEIGHT: 0.0, WEIGHT_SQUARED: 0.0}) == {WEIGHT: 0.0, WEIGHT_SQUARED: 0.0}


# Properties that hold for any values


@given(seed=seeds, count=st.integers(1, 6), level=levels)
@settings(max_examples=50, deadline=None)
def test_with_one_token_a_sequence_all_levels_agree(seed, count, level):
    inputs = random_loss_inputs(seed, [[1]] * count)
    assert torch.allclose(importance_ratio(inputs, level), importance_ratio(inputs, CorrectionLevel.TOKEN))
    if level is not CorrectionLevel.SEQUENCE:  # which has no difference
        assert torch.allclose(probability_difference(inputs, level), probability_difference(inputs, CorrectionLevel.TOKEN))


@given(seed=seeds, lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_with_one_turn_a_sequence_the_segment_is_the_geometric_mean_and_its_power_the_product(seed, lengths):
    inputs = random_loss_inputs(seed, [[length] for length in lengths])
    segment_N, geometric_N, product_N = (
        importance_ratio(inputs, level)
        for level in (CorrectionLevel.SEGMENT, CorrectionLevel.GEOMETRIC, CorrectionLevel.SEQUENCE)
    )
    lengths_N = torch.tensor([float(length) for length in lengths for _ in range(length)], dtype=torch.float64)
    assert torch.allclose(segment_N, geometric_N)
    assert torch.allclose(geometric_N**lengths_N, product_N)


@given(seed=seeds, layout=layouts, level=levels)
@settings(max_examples=50, deadline=None)
def test_where_anchor_and_sampler_agree_nothing_is_corrected(seed, layout, level):
    inputs = random_loss_inputs(seed, layout, masked_share=0.3)
    inputs = replace(inputs, sampler_logprobs_N=inputs.anchor_logprobs_N)
    mean_level = CorrectionLevel.GEOMETRIC if level is CorrectionLevel.SEQUENCE else level
    differences = FilterConfig(level=mean_level, compared=Compared.DIFFERENCE, lower=-0.1, upper=0.1)
    filters = (FilterConfig(level=level), differences)
    corrected, sums = correction(*filters, level=level, veto_below=0.5)(inputs)
    assert torch.equal(corrected.mask_N, inputs.mask_N)
    assert torch.equal(corrected.weights_N * corrected.mask_N, inputs.weights_N * inputs.mask_N)
    assert sums["correction/kept"] == sums[WEIGHT] == sums[WEIGHT_SQUARED] == inputs.mask_N.sum()


@given(seed=seeds, layout=layouts, level=levels)
@settings(max_examples=50, deadline=None)
def test_a_wider_filter_keeps_all_that_a_narrower_one_keeps(seed, layout, level):
    inputs = random_loss_inputs(seed, layout)
    narrow_N = is_kept(inputs, FilterConfig(level=level, lower=0.9, upper=1.1))
    wide_N = is_kept(inputs, FilterConfig(level=level, lower=0.7, upper=1.4))
    assert (wide_N | ~narrow_N).all()


@given(seed=seeds, layout=layouts, bound=st.floats(0.3, 0.95))
@settings(max_examples=50, deadline=None)
def test_the_veto_removes_exactly_the_sequences_that_hold_a_ratio_below_it(seed, layout, bound):
    inputs = random_loss_inputs(seed, layout)
    is_low_N = importance_ratio(inputs, CorrectionLevel.TOKEN) < bound
    for sequence in range(inputs.num_sequences):
        of_sequence_N = inputs.sequence_N == sequence
        kept = is_not_vetoed(inputs, bound)[of_sequence_N]
        assert set(kept.tolist()) == {not is_low_N[of_sequence_N].any().item()}


@given(seed=seeds, layout=layouts, name=st.sampled_from(list(CORRECTIONS)))
@settings(max_examples=50, deadline=None)
def test_corrections_only_remove_tokens_and_their_sums_are_over_the_tokens_left(seed, layout, name):
    inputs = random_loss_inputs(seed, layout, masked_share=0.3)
    inputs = replace(inputs, weights_N=torch.ones_like(inputs.weights_N))
    corrected, sums = (CORRECTIONS[name] or correction())(inputs)
    assert (corrected.mask_N <= inputs.mask_N).all()
    assert sums["correction/kept"] == corrected.mask_N.sum()
    assert torch.allclose(sums[WEIGHT], (corrected.weights_N * corrected.mask_N).sum())
    assert torch.allclose(sums[WEIGHT_SQUARED], (corrected.weights_N * corrected.mask_N).square().sum())


@given(seed=seeds, layout=layouts)
@settings(max_examples=50, deadline=None)
def test_the_order_of_filters_does_not_matter(seed, layout):
    inputs = random_loss_inputs(seed, layout)
    filters = (FilterConfig(lower=0.8, upper=1.2), FilterConfig(level=CorrectionLevel.GEOMETRIC, lower=0.9, upper=1.2))
    one, other = (correct(inputs, weighting=None, filters=each, veto_below=None)[0] for each in (filters, filters[::-1]))
    assert torch.equal(one.mask_N, other.mask_N)


@given(seed=seeds, layout=layouts)
@settings(max_examples=50, deadline=None)
def test_a_filtered_token_trains_as_if_it_had_been_masked_by_hand(seed, layout):
    inputs = random_loss_inputs(seed, layout)
    each = FilterConfig(lower=0.8, upper=1.2)
    by_hand = replace(inputs, mask_N=is_kept(inputs, each).double())
    filtered = policy_loss(inputs, objective=policy_gradient, reduce=token_mean, correction=correction(each)).loss
    masked = policy_loss(by_hand, objective=policy_gradient, reduce=token_mean).loss
    assert torch.equal(*(gradient(loss, inputs.policy_logprobs_N) for loss in (filtered, masked)))


def test_weights_have_no_gradient_even_where_the_anchor_has_one():
    # with one optimizer step an iteration the anchor may be the policy itself
    inputs = random_loss_inputs(0)
    inputs = replace(inputs, anchor_logprobs_N=inputs.policy_logprobs_N)
    for level in CorrectionLevel:
        assert not importance_ratio(inputs, level).requires_grad
    for level in set(CorrectionLevel) - {CorrectionLevel.SEQUENCE}:
        assert not probability_difference(inputs, level).requires_grad


def effective_sample_size(weights: list[float]) -> float:
    """Effective sample size as it is reported: from the means of the sums of a correction."""
    _, sums = correction(level=CorrectionLevel.TOKEN)(with_ratios(weights))
    metrics = with_effective_sample_size({name: value.item() / len(weights) for name, value in sums.items()})
    return metrics["correction/effective_sample_size"]


@given(weight=st.floats(0.01, 100.0), count=st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_equal_weights_have_an_effective_sample_size_of_one(weight, count):
    assert effective_sample_size([weight] * count) == pytest.approx(1.0)


@given(count=st.integers(2, 8))
@settings(max_examples=50, deadline=None)
def test_one_weight_that_dominates_leaves_one_sample_of_all(count):
    assert effective_sample_size([1e4] + [1e-4] * (count - 1)) == pytest.approx(1 / count, rel=1e-6)


@given(weights=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_the_effective_sample_size_lies_between_one_sample_and_all(weights):
    assert 1 / len(weights) - 1e-9 <= effective_sample_size(weights) <= 1 + 1e-9


def test_a_removed_token_counts_as_a_sample_lost():
    # three of four tokens kept with weight 1: (3/4)^2 / (3/4)
    _, sums = correction(FilterConfig())(with_ratios([1.0, 1.0, 1.0, 9.0]))
    metrics = with_effective_sample_size({name: value.item() / 4 for name, value in sums.items()})
    assert metrics["correction/effective_sample_size"] == pytest.approx(0.75)


def test_tokens_that_a_filter_removed_do_not_count_in_the_weights_of_the_rest():
    # ratios 1, 1, 1 and 64, which the token filter removes: the geometric mean of the rest is 1, not 64^(1/4) = 2.83
    inputs = loss_inputs(policy=[0.0] * 4, anchor=[0.0] * 4, sampler=[0.0, 0.0, 0.0, -math.log(64)])
    weighting = WeightingConfig(level=CorrectionLevel.GEOMETRIC, upper=None)
    corrected, _ = correct(inputs, weighting=weighting, filters=(FilterConfig(),), veto_below=None)
    assert corrected.mask_N.tolist() == [1, 1, 1, 0]
    assert corrected.weights_N.tolist() == pytest.approx([1, 1, 1, 0])


def test_filters_of_differences_have_default_bounds_of_their_own():
    assert FilterConfig(compared=Compared.DIFFERENCE).bounds == (-0.2, 0.2)
    assert FilterConfig().bounds == (0.5, 5.0)
    assert FilterConfig(compared=Compared.DIFFERENCE, upper=0.1).bounds == (-0.2, 0.1)


def test_weights_have_a_floor():
    inputs = loss_inputs(policy=[0.0] * 2, anchor=[-3.0, 0.0], sampler=[0.0, 0.0])
    corrected, _ = correct(inputs, weighting=WeightingConfig(lower=0.5), filters=(), veto_below=None)
    assert corrected.weights_N.tolist() == pytest.approx([0.5, 1.0])
