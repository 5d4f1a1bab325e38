"""Shaping of rewards, masks and weights of trajectories, the KL controller, and statistics by group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.algorithms.grouping import (
    centred_by,
    count_by,
    discounted_sums,
    last_of,
    masked_mean_by,
    max_by,
    mean_by,
    min_by,
    number_pairs,
    std_by,
    sum_by,
)
from roll_core.algorithms.masks import (
    difficulty_weights,
    is_not_long_and_wrong,
    is_of_use,
    is_whole,
    length_weights,
    rescaled_to_mean_one,
)
from roll_core.algorithms.shaping import Moments, adapted_coefficient, divisors, normalized, overlong_penalty
from roll_core.config.algorithm.shaping import StatisticsFrom
from tests.unit.algorithms.builders_advantages import few, floats, fractions, quarters

NONE, GROUP, DOMAIN, BATCH, RUNNING = StatisticsFrom
GROUPED = st.lists(st.tuples(quarters, st.integers(0, 3)), min_size=1, max_size=8)
"""Values with the numbers of their groups. There are four groups, and some may be empty."""


def values_and_groups(grouped: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Split pairs into a tensor of values and a tensor of group numbers."""
    return floats([value for value, _ in grouped]), torch.tensor([group for _, group in grouped])


def members(grouped: list[tuple[float, int]]) -> list[list[float]]:
    """Values of each of the four groups."""
    return [[value for value, other in grouped if other == group] for group in range(4)]


# Grouping.


def test_sums_and_spreads_by_group_by_hand():
    # group 0: 1, 3; group 1: empty; group 2: 5
    values_X, group_X = floats([1, 5, 3]), torch.tensor([0, 2, 0])
    assert sum_by(values_X, group_X, 3).tolist() == [4, 0, 5]
    assert count_by(group_X, 3, values_X).tolist() == [2, 0, 1]
    assert mean_by(values_X, group_X, 3).tolist() == [2, 0, 5]
    assert max_by(values_X, group_X, 3).tolist() == [3, 0, 5]
    assert min_by(values_X, group_X, 3).tolist() == [1, 0, 5]
    assert centred_by(values_X, group_X, 3).tolist() == [-1, 0, 1]
    assert std_by(values_X, group_X, 3).tolist() == pytest.approx([2**0.5, 0, 0])  # sqrt((1 + 1) / (2 - 1)); one: 0
    assert last_of(group_X, 3).tolist() == [2, 0, 1]


def test_masked_means_leave_out_masked_values_even_if_they_are_nan():
    # group 0: 1 and 3 count, 9 does not: 2; group 1: nothing counts: 0
    values_X, group_X = floats([1, 9, 3, float("nan")]), torch.tensor([0, 0, 0, 1])
    assert masked_mean_by(values_X, floats([1, 0, 1, 0]), group_X, 2).tolist() == [2, 0]


@few
@given(GROUPED)
def test_statistics_by_group_are_those_of_each_groups_members(grouped):
    values_X, group_X = values_and_groups(grouped)
    if_empty = [0.0]
    sums = floats([sum(group) for group in members(grouped)])
    sizes = floats([len(group) for group in members(grouped)])
    means = floats([sum(group) / max(len(group), 1) for group in members(grouped)])
    stds = floats([floats(group).std().item() if len(group) > 1 else 0.0 for group in members(grouped)])
    assert torch.equal(sum_by(values_X, group_X, 4), sums)
    assert torch.equal(count_by(group_X, 4, values_X), sizes)
    assert torch.allclose(mean_by(values_X, group_X, 4), means)
    assert torch.equal(max_by(values_X, group_X, 4), floats([max(group or if_empty) for group in members(grouped)]))
    assert torch.equal(min_by(values_X, group_X, 4), floats([min(group or if_empty) for group in members(grouped)]))
    assert torch.allclose(centred_by(values_X, group_X, 4), values_X - means[group_X])
    assert torch.allclose(std_by(values_X, group_X, 4), stds)


@few
@given(st.lists(st.tuples(quarters, st.integers(0, 3), st.booleans()), min_size=1, max_size=8))
def test_a_masked_mean_is_the_mean_of_the_unmasked_values(entries):
    values_X, group_X = values_and_groups([(value, group) for value, group, _ in entries])
    mask_X = floats([float(kept) for _, _, kept in entries])
    is_kept_X = mask_X.bool()
    left_G = mean_by(values_X[is_kept_X], group_X[is_kept_X], 4)
    assert torch.allclose(masked_mean_by(values_X, mask_X, group_X, 4), left_G)


@few
@given(st.floats(-1e3, 1e3), st.integers(1, 7))
def test_equal_values_are_exactly_centred_whatever_their_mean_rounds_to(value, size):
    assert centred_by(floats([value] * size), torch.zeros(size, dtype=torch.long), 1).tolist() == [0.0] * size


def test_pairs_are_numbered_by_hand():
    # (0, 7) twice, (0, 8) once, (1, 7) once: three kinds
    numbers_X, count = number_pairs(torch.tensor([0, 1, 0, 0]), torch.tensor([7, 7, 8, 7]))
    assert count == 3
    assert numbers_X[0] == numbers_X[3]
    assert len(set(numbers_X.tolist())) == 3


@few
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_two_positions_have_the_same_number_exactly_when_their_pairs_are_equal(pairs):
    numbers_X, count = number_pairs(torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs]))
    numbers = numbers_X.tolist()
    assert set(numbers) == set(range(count))
    assert [[a == b for a in numbers] for b in numbers] == [[a == b for a in pairs] for b in pairs]


@few
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_the_last_of_a_group_is_the_last_position_with_its_number(groups):
    last = last_of(torch.tensor(groups), 4).tolist()
    for group in set(groups):
        assert last[group] == len(groups) - 1 - groups[::-1].index(group)


def test_discounted_sums_by_hand():
    # group 0: 4 + 0.5 * 2 = 5, 2; group 1 is empty; group 2: 1 + 0.5 * (0 + 0.5 * 8) = 3, 4, 8
    sums_X = discounted_sums(floats([4, 2, 1, 0, 8]), torch.tensor([0, 0, 2, 2, 2]), 3, 0.5)
    assert sums_X.tolist() == [5, 2, 3, 4, 8]
    assert discounted_sums(floats([]), torch.tensor([], dtype=torch.long), 0, 0.5).tolist() == []


@few
@given(GROUPED, fractions)
def test_discounted_sums_are_those_of_a_plain_loop(grouped, discount):
    values_X, group_X = values_and_groups(sorted(grouped, key=lambda entry: entry[1]))
    values, groups = values_X.tolist(), group_X.tolist()
    for position in range(len(values) - 2, -1, -1):
        if groups[position] == groups[position + 1]:
            values[position] += discount * values[position + 1]
    assert torch.allclose(discounted_sums(values_X, group_X, 4, discount), floats(values))


# Normalised rewards.

REWARDS, GROUPS, DOMAINS = floats([1, 3, 0, 4]), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1])
MOMENTS = [Moments(count=5, mean=1.0, squares=16.0), Moments(count=2, mean=2.0, squares=0.25)]  # stds 2 and 0.5


@pytest.mark.parametrize(
    ("mean_from", "expected"),
    [
        (NONE, [1, 3, 0, 4]),
        (GROUP, [-1, 1, -2, 2]),  # means 2, 2
        (DOMAIN, [-1 / 3, 5 / 3, -4 / 3, 0]),  # means of 1, 3, 0 and of 4
        (BATCH, [-1, 1, -2, 2]),  # mean 2
        (RUNNING, [0, 2, -1, 2]),  # means 1 and 2
    ],
)
def test_rewards_with_every_source_of_the_mean_by_hand(mean_from, expected):
    among = {"group_S": GROUPS, "domain_S": DOMAINS, "moments_D": MOMENTS}
    assert normalized(REWARDS, mean_from=mean_from, std_from=NONE, **among).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("std_from", "expected"),
    [
        (NONE, [1, 1, 1, 1]),
        (GROUP, [2**0.5, 2**0.5, 8**0.5, 8**0.5]),  # sqrt(1 + 1), sqrt(4 + 4)
        (DOMAIN, [(7 / 3) ** 0.5] * 3 + [1]),  # squares 1/9 + 25/9 + 16/9 = 42/9, halved; one alone has none: 1
        (BATCH, [(10 / 3) ** 0.5] * 4),  # squares 1 + 1 + 4 + 4
        (RUNNING, [2, 2, 2, 0.5]),  # sqrt(16 / 4), sqrt(0.25 / 1)
    ],
)
def test_rewards_with_every_source_of_the_deviation_by_hand(std_from, expected):
    among = {"group_S": GROUPS, "domain_S": DOMAINS, "moments_D": MOMENTS}
    divisors_S = divisors(REWARDS, std_from=std_from, **among)
    assert divisors_S.tolist() == pytest.approx(expected, abs=2e-6)
    expected_S = normalized(REWARDS, mean_from=BATCH, std_from=NONE, **among) / divisors_S
    assert torch.equal(normalized(REWARDS, mean_from=BATCH, std_from=std_from, **among), expected_S)


@few
@given(GROUPED, st.sampled_from([GROUP, DOMAIN, BATCH]), st.integers(1, 8), quarters)
def test_normalised_rewards_ignore_zero_and_unit_if_mean_and_deviation_have_the_same_source(grouped, source, unit, shift):
    rewards_S, group_S = values_and_groups(grouped)
    among = {"mean_from": source, "std_from": source, "group_S": group_S, "domain_S": group_S % 2, "moments_D": []}
    plain_S, moved_S = normalized(rewards_S, **among), normalized(rewards_S * unit + shift, **among)
    assert torch.allclose(plain_S, moved_S, atol=1e-4)


@few
@given(GROUPED)
def test_normalised_by_group_rewards_have_mean_zero_and_deviation_one_in_each(grouped):
    rewards_S, group_S = values_and_groups(grouped)
    normal_S = normalized(rewards_S, mean_from=GROUP, std_from=GROUP, group_S=group_S, domain_S=group_S, moments_D=[])
    assert torch.allclose(mean_by(normal_S, group_S, 4), torch.zeros(4, dtype=torch.float64), atol=1e-9)
    differs_G = floats([float(len(set(group)) > 1) for group in members(grouped)])
    assert torch.allclose(std_by(normal_S, group_S, 4), differs_G, atol=1e-4)


@few
@given(st.lists(quarters, min_size=1, max_size=8))
def test_running_statistics_of_one_batch_alone_are_the_batchs(rewards):
    rewards_S, zeros_S = floats(rewards), torch.zeros(len(rewards), dtype=torch.long)
    among = {"group_S": zeros_S, "domain_S": zeros_S, "moments_D": [Moments().with_values(rewards_S)]}
    running_S = normalized(rewards_S, mean_from=RUNNING, std_from=RUNNING, **among)
    assert torch.allclose(running_S, normalized(rewards_S, mean_from=BATCH, std_from=BATCH, **among), atol=1e-6)


# Moments.


def test_moments_by_hand():
    # 1, 3: mean 2, squares 1 + 1; then 5: delta 3, mean 2 + 3 / 3, squares 2 + 0 + 9 * 2 * 1 / 3 = 8 = 4 + 0 + 4
    first = Moments().with_values(floats([1, 3]))
    assert first == Moments(count=2, mean=2, squares=2)
    assert first.std == pytest.approx(2**0.5)
    assert first.with_values(floats([5])) == Moments(count=3, mean=3, squares=8)
    assert first.with_values(floats([])) == first
    assert Moments().std == 0.0


@few
@given(st.lists(st.lists(quarters, max_size=4), min_size=1, max_size=5).filter(lambda batches: sum(map(len, batches)) > 1))
def test_moments_are_the_same_whatever_batches_the_values_came_in(batches):
    moments = Moments()
    for batch in batches:
        moments = moments.with_values(floats(batch))
    values = floats([value for batch in batches for value in batch])
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(values.mean().item(), abs=1e-9)
    assert moments.std == pytest.approx(values.std().item(), abs=1e-6)


# The overlong penalty.


def test_the_overlong_penalty_by_hand():
    # limit 10, buffer 4: nothing up to 6, then a quarter a token, whole at 10 and above
    penalty_S = overlong_penalty(torch.tensor([1, 6, 7, 9, 10, 12]), max_tokens=10, buffer_tokens=4)
    assert penalty_S.tolist() == [0, 0, -0.25, -0.75, -1, -1]


@few
@given(st.integers(1, 40), st.integers(2, 30), st.data())
def test_the_overlong_penalty_falls_from_nothing_before_the_buffer_to_minus_one_at_the_limit(length, limit, data):
    buffer = data.draw(st.integers(1, limit))
    shorter, this = overlong_penalty(torch.tensor([length - 1, length]), max_tokens=limit, buffer_tokens=buffer).tolist()
    assert this <= shorter
    assert (this == 0) == (length <= limit - buffer)
    assert (this == -1) == (length >= limit)


# Masks.


def test_cut_off_completions_are_not_whole():
    assert is_whole(torch.tensor([True, False])).tolist() == [False, True]


def test_groups_of_use_by_hand():
    # accuracies 1, 0.5, 0: neither bound is included
    correct_S, group_S = torch.tensor([1, 1, 1, 0, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert is_of_use(correct_S, group_S, min_accuracy=0, max_accuracy=1).tolist() == [False, False, True, True, False, False]
    assert is_of_use(correct_S, group_S, min_accuracy=-1, max_accuracy=0.5).tolist() == [False] * 4 + [True] * 2


def test_long_wrong_answers_by_hand():
    kept_S = is_not_long_and_wrong(torch.tensor([0, 0, 1]), torch.tensor([5, 6, 6]), max_tokens=5)
    assert kept_S.tolist() == [True, False, True]


answers = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=8)
"""Strategy of answers: whether right, the group, the length."""


def columns(entries: list[tuple[bool, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    correct, groups, lengths = zip(*entries, strict=True)
    return torch.tensor(correct), torch.tensor(groups), torch.tensor(lengths)


@few
@given(answers, fractions, fractions)
def test_masks_remove_exactly_what_they_name(entries, low, high):
    correct_S, group_S, lengths_S = columns(entries)
    shares = [[right for right, other, _ in entries if other == group] for _, group, _ in entries]
    of_use = [low < sum(share) / len(share) < high for share in shares]
    assert is_of_use(correct_S, group_S, min_accuracy=low, max_accuracy=high).tolist() == of_use
    long_and_wrong = [not right and length > 4 for right, _, length in entries]
    assert is_not_long_and_wrong(correct_S, lengths_S, max_tokens=4).tolist() == [not flag for flag in long_and_wrong]
    assert is_whole(correct_S).tolist() == [not flag for flag in correct_S.tolist()]


# Weights.


def test_difficulty_weights_by_hand():
    # accuracies 1, 0.5, 0 between 0.5 (easiest) and 2 (hardest)
    correct_S, group_S = torch.tensor([1, 1, 1, 0, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    weights_S = difficulty_weights(correct_S, group_S, easiest=0.5, hardest=2.0)
    assert weights_S.tolist() == [0.5, 0.5, 1.25, 1.25, 2.0, 2.0]


def test_length_weights_by_hand():
    # lengths 2, 4, 6 between 1.5 (shortest) and 0.5 (longest); equal lengths are all shortest
    assert length_weights(torch.tensor([2, 4, 6]), shortest=1.5, longest=0.5).tolist() == [1.5, 1.0, 0.5]
    assert length_weights(torch.tensor([3, 3]), shortest=1.5, longest=0.5).tolist() == [1.5, 1.5]


def test_weights_are_rescaled_to_a_mean_of_one():
    assert rescaled_to_mean_one(floats([1, 3])).tolist() == [0.5, 1.5]
    assert rescaled_to_mean_one(floats([])).tolist() == []


def test_weights_that_are_all_zero_stay_zero():
    # 0 / 0 would be trained on as not-a-number
    assert rescaled_to_mean_one(floats([0, 0])).tolist() == [0, 0]


@few
@given(answers, fractions, fractions)
def test_weights_are_within_their_range_and_in_the_order_of_difficulty_or_length(entries, first, last):
    correct_S, group_S, lengths_S = columns(entries)
    difficulty_S = 1 - mean_by(correct_S.double(), group_S, 3)[group_S]
    weighed = [
        (difficulty_S, difficulty_weights(correct_S, group_S, easiest=first, hardest=last)),
        (lengths_S, length_weights(lengths_S, shortest=first, longest=last)),
    ]
    for measure_S, weights_S in weighed:
        assert weights_S.min() >= min(first, last) - 1e-12
        assert weights_S.max() <= max(first, last) + 1e-12
        along_S = weights_S[measure_S.argsort(stable=True)] * (1 if last >= first else -1)
        assert bool((along_S.diff() >= -1e-12).all())


@few
@given(st.lists(st.integers(1, 9).map(float), min_size=1, max_size=6), st.integers(1, 5))
def test_rescaled_weights_have_mean_one_and_ignore_their_unit(weights, unit):
    rescaled_S = rescaled_to_mean_one(floats(weights))
    assert rescaled_S.mean().item() == pytest.approx(1)
    assert torch.allclose(rescaled_to_mean_one(floats(weights) * unit), rescaled_S)
    assert torch.allclose(rescaled_S / rescaled_S[0], floats(weights) / weights[0])


# The KL controller.


@pytest.mark.parametrize(
    ("measured", "num_samples", "expected"),
    [
        (6.0, 100, 0.1),  # on target
        (6.6, 100, 0.101),  # 10 % above: 0.1 * (1 + 0.1 * 100 / 1000)
        (60.0, 100, 0.102),  # far above: the error is cut at 0.2
        (0.0, 100, 0.098),  # far below: at -0.2
        (60.0, 9000, 0.12),  # more samples than the horizon: by a fifth and no more
        (0.0, 9000, 0.08),
    ],
)
def test_the_adapted_coefficient_by_hand(measured, num_samples, expected):
    coefficient = adapted_coefficient(
        0.1, measured=measured, target=6.0, num_samples=num_samples, horizon=1000, max_error=0.2
    )
    assert coefficient == pytest.approx(expected)


@few
@given(st.floats(1e-4, 1), st.floats(-5, 50), st.floats(0.1, 10), st.integers(0, 5000), st.floats(1, 5000))
def test_the_coefficient_moves_towards_the_target_by_at_most_a_fifth_and_stays_positive(
    coefficient, measured, target, num_samples, horizon
):
    knobs = {"target": target, "num_samples": num_samples, "horizon": horizon, "max_error": 0.2}
    following = adapted_coefficient(coefficient, measured=measured, **knobs)
    assert 0.8 * coefficient - 1e-12 <= following <= 1.2 * coefficient + 1e-12
    assert (following - coefficient) * (measured - target) >= 0
    assert adapted_coefficient(coefficient, measured=target, **knobs) == coefficient
    assert following <= adapted_coefficient(coefficient, measured=measured + 1, **knobs)
