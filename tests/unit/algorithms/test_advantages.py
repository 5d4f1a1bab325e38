"""Advantages: values worked by hand, and properties that hold for every batch."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll_core.algorithms.advantages import (
    batch_normalized,
    best_of_group,
    constant_baseline,
    distilled_and_rewarded,
    generalized_advantage,
    greedy_baseline,
    group_baseline_batch_normalized,
    group_in_group,
    group_mean_batch_std,
    group_normalized,
    group_relative,
    leave_one_out,
    monte_carlo_return,
    normalized_step_return,
    reverse_kl_to_teachers,
    turn_return,
    whitened,
)
from roll_core.algorithms.inputs import AdvantageInputs
from tests.unit.algorithms.builders_advantages import (
    advantage_inputs,
    few,
    floats,
    fractions,
    picked,
    quarters,
    random_batches,
)

RELATIVE_TO_GROUP = [group_relative, group_normalized, group_mean_batch_std, leave_one_out]
GIGPO = partial(group_in_group, discount=0.5, episode_weight=1.0, step_weight=2.0, scale_by_std=False)
GAE = partial(generalized_advantage, discount=0.5, trace_decay=0.8, bootstrap_truncated=True)
OF_TURNS = [partial(turn_return, discount=0.5), partial(normalized_step_return, discount=0.5), GIGPO]
WHITENED = [batch_normalized, group_baseline_batch_normalized]
ALL = [*RELATIVE_TO_GROUP, *OF_TURNS, *WHITENED, GAE, partial(monte_carlo_return, discount=0.5), best_of_group]


def close(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-7, atol=1e-7)


def naive_token_returns(inputs: AdvantageInputs) -> Tensor:
    """Return of each token by a plain loop: the sum of the token rewards from it to the end of its sequence."""
    assert inputs.token_rewards_N is not None
    sequence, rewards = inputs.sequence_N.tolist(), inputs.token_rewards_N.tolist()
    positions = range(len(sequence))
    return floats([sum(rewards[k] for k in positions if k >= n and sequence[k] == sequence[n]) for n in positions])


# All methods.


@few
@given(random_batches(), st.data())
def test_advantages_follow_their_trajectories_whatever_the_order_of_the_batch(batch, data):
    order = data.draw(st.permutations(range(batch.num_sequences)))
    permuted, tokens_N = picked(batch, order)
    for advantage in ALL:
        assert close(advantage(permuted), advantage(batch)[tokens_N]), advantage


@few
@given(random_batches(), st.permutations(range(3)))
def test_the_numbers_of_groups_do_not_matter(batch, numbers):
    renumbered = replace(batch, group_S=torch.tensor(numbers)[batch.group_S])
    for advantage in ALL:
        assert close(advantage(renumbered), advantage(batch)), advantage


@few
@given(random_batches(), st.integers(0, 2))
def test_without_batch_statistics_the_advantages_of_a_group_depend_on_the_group_alone(batch, group):
    members = (batch.group_S == group).nonzero()[:, 0].tolist()
    if not members:
        return
    alone, tokens_N = picked(batch, members)
    for advantage in [group_relative, group_normalized, leave_one_out, best_of_group, GAE, *OF_TURNS]:
        assert close(advantage(alone), advantage(batch)[tokens_N]), advantage


@pytest.mark.parametrize("advantage", [*RELATIVE_TO_GROUP, *WHITENED, GIGPO])
def test_equal_rewards_give_exactly_zero_even_when_their_mean_rounds(advantage):
    # the sum of three 0.1 is 0.30000000000000004: subtracting its third leaves a residue that must not be trained on
    assert advantage(advantage_inputs([0.1, 0.1, 0.1])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("advantage", [*RELATIVE_TO_GROUP, *WHITENED, GIGPO])
def test_a_group_of_one_gets_zero(advantage):
    assert advantage(advantage_inputs([0.7])).tolist() == [0.0]


@pytest.mark.parametrize("advantage", RELATIVE_TO_GROUP)
def test_every_token_of_a_trajectory_gets_its_advantage(advantage):
    advantages = advantage(advantage_inputs([1, 0], turns=[[2, 1], [1]])).tolist()
    assert advantages == [advantages[0]] * 3 + [-advantages[0]]
    assert advantages[0] > 0


def test_a_token_penalty_is_charged_to_its_token_and_all_before_it_but_not_to_the_baseline():
    # returns of -0.1, -0.2 | -0.4 are -0.3, -0.2 | -0.4; group_relative gives +-0.5
    inputs = advantage_inputs([1, 0], turns=[[2], [1]], token_rewards_N=[-0.1, -0.2, -0.4])
    assert group_relative(inputs).tolist() == pytest.approx([0.2, 0.3, -0.9])


@few
@given(random_batches())
def test_token_rewards_are_added_as_returns_where_no_baseline_takes_them_in(batch):
    for advantage in [group_relative, group_normalized, group_mean_batch_std, *OF_TURNS, best_of_group, monte_carlo_return]:
        without = advantage(replace(batch, token_rewards_N=None))
        assert close(advantage(batch), without + naive_token_returns(batch)), advantage


# Returns.


def test_monte_carlo_returns_by_hand():
    # 3 in all, of which 1 is paid at the end of the first turn (two tokens): paid 0, 1 | 2
    inputs = advantage_inputs([3], turns=[[2, 1]], turn_rewards=[[1, 0]])
    assert monte_carlo_return(inputs).tolist() == [3.0, 3.0, 2.0]  # the sum of rewards from each token on
    assert monte_carlo_return(inputs, discount=0.5).tolist() == [1.0, 2.0, 2.0]  # 0 + 0.5 * 2; 1 + 0.5 * 2; 2


@few
@given(random_batches())
def test_the_monte_carlo_return_is_continuous_at_a_discount_of_one(batch):
    assert torch.allclose(monte_carlo_return(batch), monte_carlo_return(batch, discount=1 - 1e-9), atol=1e-6)


@few
@given(random_batches())
def test_the_first_token_is_credited_with_the_whole_reward_of_its_trajectory(batch):
    without = replace(batch, token_rewards_N=None)
    firsts_S = torch.cat([torch.tensor([True]), batch.sequence_N[1:] != batch.sequence_N[:-1]])
    assert close(monte_carlo_return(without)[firsts_S], batch.rewards_S)


def test_turn_returns_by_hand():
    # 4 in all, 1 and 1 of it paid by the first and third turns: paid 1, 0, 3; G3 = 3, G2 = 0 + 1.5, G1 = 1 + 0.75
    inputs = advantage_inputs([4], turns=[[2, 1, 1]], turn_rewards=[[1, 0, 1]])
    assert turn_return(inputs, discount=0.5).tolist() == [1.75, 1.75, 1.5, 3.0]


@few
@given(random_batches(max_turns=1), fractions)
def test_with_one_turn_a_trajectory_the_turn_return_is_the_monte_carlo_return(batch, discount):
    assert close(turn_return(batch, discount=discount), monte_carlo_return(batch))


@few
@given(random_batches(max_tokens=1, pays_tokens=False), fractions)
def test_with_one_token_a_turn_the_turn_return_is_the_monte_carlo_return(batch, discount):
    assert close(turn_return(batch, discount=discount), monte_carlo_return(batch, discount=discount))


def test_normalized_step_returns_by_hand():
    # G of the first trajectory: 0 + 0.5 * 2 = 1, then 2; of the second: 0. Mean 1, std sqrt((0 + 1 + 1) / 2) = 1
    inputs = advantage_inputs([2, 0], turns=[[1, 2], [1]])
    assert normalized_step_return(inputs, discount=0.5).tolist() == pytest.approx([0, 1, 1, -1], abs=1e-5)


@few
@given(random_batches(max_turns=1, pays_tokens=False))
def test_with_one_turn_a_trajectory_normalized_step_returns_are_grpo(batch):
    assert close(normalized_step_return(batch, discount=0.5), group_normalized(batch))


@few
@given(random_batches(max_tokens=1, pays_turns=False, pays_tokens=False), st.integers(1, 8))
def test_normalized_step_returns_ignore_the_unit_of_rewards(batch, unit):
    advantage = partial(normalized_step_return, discount=0.5)
    scaled = replace(batch, rewards_S=batch.rewards_S * unit)
    assert torch.allclose(advantage(scaled), advantage(batch), atol=1e-4)


# Against the batch.


def test_batch_normalized_by_hand():
    # tokens 1 | 0, 0, 0: mean 0.25, variance (0.5625 + 3 * 0.0625) / 3 = 0.25, std 0.5
    advantages = batch_normalized(advantage_inputs([1, 0], turns=[[1], [3]]))
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    # discounted: 0.5 * 2, 2 | 0: mean 1, std 1
    advantages = batch_normalized(advantage_inputs([2, 0], turns=[[2], [1]]), discount=0.5)
    assert advantages.tolist() == pytest.approx([0, 1, -1], abs=1e-5)


def test_group_baseline_batch_normalized_by_hand():
    # minus the group's mean: 0.5, -0.5 | 4, -2, -2; variance over the batch (0.25 + 0.25 + 16 + 4 + 4) / 4, std 2.474874
    advantages = group_baseline_batch_normalized(advantage_inputs([1, 0, 6, 0, 0], [0, 0, 1, 1, 1]))
    assert advantages.tolist() == pytest.approx([0.202031, -0.202031, 1.616244, -0.808122, -0.808122], abs=1e-5)


@few
@given(random_batches(pays_turns=False, pays_tokens=False), st.integers(1, 8), quarters)
def test_batch_normalized_ignores_zero_and_unit_of_rewards(batch, unit, shift):
    moved = replace(batch, rewards_S=batch.rewards_S * unit + shift)
    assert torch.allclose(batch_normalized(moved), batch_normalized(batch), atol=1e-4)


def test_whitened_by_hand():
    # mean 2, deviations -1, 0, 1, std sqrt(2 / 2) = 1
    assert whitened(floats([1, 2, 3])).tolist() == pytest.approx([-1, 0, 1], abs=1e-5)
    assert whitened(floats([5])).tolist() == [0.0]
    assert whitened(floats([])).tolist() == []


@few
@given(st.lists(quarters, min_size=2, max_size=8).filter(lambda numbers: len(set(numbers)) > 1))
def test_whitened_values_have_mean_zero_and_deviation_one(numbers):
    values_N = whitened(floats(numbers))
    assert values_N.mean().item() == pytest.approx(0, abs=1e-9)
    assert values_N.std().item() == pytest.approx(1, abs=1e-4)


# Against the group.


def test_group_relative_subtracts_the_mean_of_each_group():
    # group 0: mean of 1, 0, 0, 1 is 0.5; group 1: mean of 2, 4 is 3
    advantages = group_relative(advantage_inputs([1, 0, 0, 1, 2, 4], [0, 0, 0, 0, 1, 1]))
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]


def test_group_normalized_divides_by_the_unbiased_standard_deviation():
    # rewards 1, 0, 0, 1: deviations +-0.5, variance 4 * 0.25 / 3 = 1/3, std 0.57735
    advantages = group_normalized(advantage_inputs([1, 0, 0, 1]))
    assert advantages.tolist() == pytest.approx([0.866025, -0.866025, -0.866025, 0.866025], abs=1e-5)


def test_group_mean_batch_std_by_hand():
    # batch 1, 0, 4, 2: mean 1.75, squares 0.5625 + 3.0625 + 5.0625 + 0.0625 = 8.75, std sqrt(8.75 / 3) = 1.707825
    # groups: +-0.5 / 1.707825 = 0.292770, +-1 / 1.707825 = 0.585540
    advantages = group_mean_batch_std(advantage_inputs([1, 0, 4, 2], [0, 0, 1, 1]))
    assert advantages.tolist() == pytest.approx([0.292770, -0.292770, 0.585540, -0.585540], abs=1e-5)


def test_leave_one_out_by_hand():
    # the means of the others of 1, 0, 2: 1, 1.5, 0.5
    assert leave_one_out(advantage_inputs([1, 0, 2])).tolist() == pytest.approx([0, -1.5, 1.5])


def test_leave_one_out_takes_the_kl_into_the_reward_before_the_baseline():
    # rewards 1 and 1, KL charges of 0.1 + 0.2 and 0.1: 0.7 and 0.9, the difference of which is 0.2; equal charges cancel
    inputs = advantage_inputs([1, 1], turns=[[2], [1]], token_rewards_N=[-0.1, -0.2, -0.1])
    assert leave_one_out(inputs).tolist() == pytest.approx([-0.2, -0.2, 0.2])
    equal = advantage_inputs([1, 1], turns=[[2], [1]], token_rewards_N=[-0.1, -0.2, -0.3])
    assert leave_one_out(equal).tolist() == pytest.approx([0.0, 0.0, 0.0])


def test_greedy_baseline_by_hand():
    inputs = advantage_inputs([1, 0], turns=[[2], [1]], greedy_rewards_S=[0.5, 0.25])
    assert greedy_baseline(inputs).tolist() == [0.5, 0.5, -0.25]


def test_best_of_group_by_hand():
    # ties of the best are all taken; the best of the second group, 0, is not above the minimum 0, but above -0.5
    inputs = advantage_inputs([1, 1, 0, 0, -1], [0, 0, 0, 1, 1])
    assert best_of_group(inputs).tolist() == [1, 1, 0, 0, 0]
    assert best_of_group(inputs, minimum_reward=-0.5).tolist() == [1, 1, 0, 1, 0]


@few
@given(random_batches(), st.lists(quarters, min_size=3, max_size=3))
def test_group_advantages_ignore_a_shift_of_each_groups_rewards(batch, shifts):
    shifted = replace(batch, rewards_S=batch.rewards_S + floats(shifts)[batch.group_S])
    for advantage in [group_relative, group_normalized, leave_one_out, group_baseline_batch_normalized]:
        assert close(advantage(shifted), advantage(batch)), advantage
    assert close(best_of_group(shifted, minimum_reward=-99), best_of_group(batch, minimum_reward=-99))


@few
@given(random_batches(pays_tokens=False), st.integers(1, 8))
def test_group_advantages_scale_with_rewards_unless_divided_by_their_spread(batch, unit):
    scaled = replace(batch, rewards_S=batch.rewards_S * unit)
    for advantage in [group_relative, leave_one_out]:
        assert close(advantage(scaled), advantage(batch) * unit), advantage
    for advantage in [group_normalized, group_mean_batch_std, group_baseline_batch_normalized]:
        assert torch.allclose(advantage(scaled), advantage(batch), atol=1e-4), advantage


@few
@given(random_batches(max_turns=1, max_tokens=1, pays_tokens=False))
def test_group_advantages_of_a_group_sum_to_zero(batch):
    for advantage in RELATIVE_TO_GROUP:
        sums_G = torch.zeros(3, dtype=torch.float64).index_add(0, batch.group_S, advantage(batch))
        assert close(sums_G, torch.zeros(3, dtype=torch.float64)), advantage


@few
@given(random_batches(pays_tokens=False))
def test_lite_ppo_is_dr_grpo_over_the_deviation_of_the_batch(batch):
    std = batch.rewards_S.std().item()
    assert close(group_mean_batch_std(batch) * (std + 1e-6), group_relative(batch))


@few
@given(random_batches(pays_tokens=False))
def test_rloo_is_dr_grpo_times_n_over_n_minus_one(batch):
    sizes_S = batch.group_S.bincount()[batch.group_S]
    factor_S = sizes_S / (sizes_S - 1).clamp(min=1)
    assert close(leave_one_out(batch), group_relative(batch) * factor_S.double()[batch.sequence_N])


@few
@given(random_batches(pays_tokens=False))
def test_remax_with_the_groups_mean_as_its_greedy_reward_is_dr_grpo(batch):
    means = [batch.rewards_S[batch.group_S == group].mean().item() for group in batch.group_S.tolist()]
    assert close(greedy_baseline(replace(batch, greedy_rewards_S=floats(means))), group_relative(batch))


@few
@given(random_batches(pays_tokens=False), quarters)
def test_best_of_group_takes_the_best_trajectories_of_each_group_that_are_above_the_minimum(batch, minimum):
    rewards, groups = batch.rewards_S.tolist(), batch.group_S.tolist()
    best = [max(r for r, other in zip(rewards, groups, strict=True) if other == group) for group in groups]
    chosen = floats([float(r == b and r > minimum) for r, b in zip(rewards, best, strict=True)])
    assert close(best_of_group(batch, minimum_reward=minimum), chosen[batch.sequence_N])


# Generalised advantages.


def test_generalized_advantages_by_hand():
    # d = 0.5 * 0.4 - 0.5 = -0.3; 0.5 * 0.6 - 0.4 = -0.1; 1 - 0.6 = 0.4
    # A = -0.3 + 0.4 * 0.06 = -0.276; -0.1 + 0.4 * 0.4 = 0.06; 0.4
    inputs = advantage_inputs([1], turns=[[3]], values_N=[0.5, 0.4, 0.6])
    advantages = generalized_advantage(inputs, discount=0.5, trace_decay=0.8, bootstrap_truncated=False)
    assert advantages.tolist() == pytest.approx([-0.276, 0.06, 0.4])


def test_turn_and_token_rewards_enter_generalized_advantages_where_they_are_paid():
    # paid: token penalties -0.1, -0.2 | -0.3, plus 0.5 at the end of the first turn and the rest, 1.5, at the last token
    # d (values 0): -0.1, 0.3, 1.2; with discount 0.5 and trace_decay 1: A = -0.1 + 0.5 * 0.9, 0.3 + 0.5 * 1.2, 1.2
    inputs = advantage_inputs(
        [2], turns=[[2, 1]], turn_rewards=[[0.5, 0]], token_rewards_N=[-0.1, -0.2, -0.3], values_N=[0, 0, 0]
    )
    advantages = generalized_advantage(inputs, discount=0.5, trace_decay=1.0, bootstrap_truncated=False)
    assert advantages.tolist() == pytest.approx([0.35, 0.9, 1.2])


@few
@given(random_batches(), fractions)
def test_without_values_and_decay_generalized_advantages_are_monte_carlo_returns(batch, discount):
    blind = replace(batch, values_N=torch.zeros_like(batch.values_N))
    advantages = generalized_advantage(blind, discount=discount, trace_decay=1.0, bootstrap_truncated=False)
    assert close(advantages, monte_carlo_return(batch, discount=discount))


@few
@given(random_batches(), fractions)
def test_without_decay_generalized_advantages_are_returns_minus_values(batch, discount):
    advantages = generalized_advantage(batch, discount=discount, trace_decay=1.0, bootstrap_truncated=False)
    assert close(advantages, monte_carlo_return(batch, discount=discount) - batch.values_N)


@few
@given(random_batches(), fractions)
def test_with_full_decay_generalized_advantages_are_temporal_differences(batch, discount):
    advantages = generalized_advantage(batch, discount=discount, trace_decay=0.0, bootstrap_truncated=True)
    paid_N = monte_carlo_return(batch, discount=0.0)  # the reward of each token itself
    sequence, values, expected = batch.sequence_N.tolist(), batch.values_N.tolist(), []
    for position, number in enumerate(sequence):
        is_last = position + 1 == len(sequence) or sequence[position + 1] != number
        final = batch.final_values_S[number].item() if batch.truncated_S[number] else 0.0
        following = final if is_last else values[position + 1]
        expected.append(paid_N[position].item() + discount * following - values[position])
    assert close(advantages, floats(expected))


@few
@given(random_batches(), fractions)
def test_values_that_equal_the_returns_leave_no_advantage(batch, decay):
    foreseen = replace(batch, values_N=monte_carlo_return(batch, discount=0.5))
    advantages = generalized_advantage(foreseen, discount=0.5, trace_decay=decay, bootstrap_truncated=False)
    assert close(advantages, torch.zeros_like(advantages))


# Groups in groups: GiGPO.


def test_group_in_group_by_hand():
    # episodes 1 and 0: +-0.5. Returns of turns: 0.5, 1 | 0, 0. State 0 is met by both first turns: 0.5 and 0, +-0.25; states
    # 1 and 2 once each: 0. Weights 1 and 2: 0.5 + 2 * 0.25, 0.5 | -0.5 - 2 * 0.25, -0.5
    inputs = advantage_inputs([1, 0], turns=[[1, 2], [1, 1]], states=[[0, 1], [0, 2]])
    assert GIGPO(inputs).tolist() == [1.0, 0.5, 0.5, -1.0, -0.5]
    # with stds: of 1, 0: sqrt(0.5), +-0.707107; of 0.5, 0: sqrt(0.125), again +-0.707107
    scaled = group_in_group(inputs, discount=0.5, episode_weight=1.0, step_weight=2.0, scale_by_std=True)
    assert scaled.tolist() == pytest.approx([2.121320, 0.707107, 0.707107, -2.121320, -0.707107], abs=1e-4)


@few
@given(random_batches(max_turns=1, pays_tokens=False), quarters, quarters, st.booleans())
def test_with_single_turns_from_one_state_gigpo_is_grpo_with_both_weights(batch, episode_weight, step_weight, scale_by_std):
    same = replace(batch, state_T=torch.zeros_like(batch.state_T))
    knobs = {"discount": 0.5, "episode_weight": episode_weight, "step_weight": step_weight, "scale_by_std": scale_by_std}
    grpo = group_normalized if scale_by_std else group_relative
    assert close(group_in_group(same, **knobs), (episode_weight + step_weight) * grpo(same))


@few
@given(random_batches(pays_tokens=False), st.booleans())
def test_where_no_state_is_met_twice_gigpo_is_grpo(batch, scale_by_std):
    distinct = replace(batch, state_T=torch.arange(batch.num_turns))
    grpo = group_normalized if scale_by_std else group_relative
    knobs = {"discount": 0.5, "episode_weight": 1.0, "step_weight": 3.0, "scale_by_std": scale_by_std}
    assert close(group_in_group(distinct, **knobs), grpo(distinct))


@few
@given(random_batches(), st.permutations(range(3)))
def test_the_numbers_of_states_do_not_matter(batch, numbers):
    assert close(GIGPO(replace(batch, state_T=torch.tensor(numbers)[batch.state_T])), GIGPO(batch))


# Distillation.


def test_reverse_kl_to_teachers_by_hand():
    # sampler -1, -2; first teacher -0.5, -3 with weights 1, 2; second -1, -1 with weights 0 (not its domain), 0.5
    # 1 * 0.5 + 0 = 0.5; 2 * -1 + 0.5 * 1 = -1.5
    inputs = advantage_inputs(
        [1, 0],
        sampler_logprobs_N=[-1, -2],
        teacher_logprobs_KN=[[-0.5, -3], [-1, -1]],
        teacher_weights_KN=[[1, 2], [0, 0.5]],
    )
    assert reverse_kl_to_teachers(inputs).tolist() == [0.5, -1.5]
    # GRPO: +-0.5 / sqrt(0.5) = +-0.707107, twice
    mixed = distilled_and_rewarded(inputs, reward_weight=2.0)
    assert mixed.tolist() == pytest.approx([1.414214 + 0.5, -1.414214 - 1.5], abs=1e-5)


logprobs = st.lists(st.floats(-8, 0), min_size=3, max_size=3)


@few
@given(logprobs, st.integers(1, 3))
def test_teachers_that_agree_with_the_sampler_teach_nothing(sampler, num_teachers):
    inputs = advantage_inputs(
        [1, 0, 1],
        sampler_logprobs_N=sampler,
        teacher_logprobs_KN=[sampler] * num_teachers,
        teacher_weights_KN=[[1.0] * 3] * num_teachers,
    )
    assert reverse_kl_to_teachers(inputs).tolist() == [0.0, 0.0, 0.0]


@few
@given(logprobs, logprobs)
def test_mixed_distillation_by_teachers_without_weight_is_grpo(sampler, teacher):
    inputs = advantage_inputs(
        [1, 0, 1], sampler_logprobs_N=sampler, teacher_logprobs_KN=[teacher], teacher_weights_KN=[[0.0] * 3]
    )
    assert close(distilled_and_rewarded(inputs, reward_weight=1.0), group_normalized(inputs))


@few
@given(logprobs, logprobs, st.floats(0, 3))
def test_mixed_distillation_without_rewards_is_pure_distillation_linear_in_a_teachers_weight(sampler, teacher, weight):
    inputs = advantage_inputs(
        [1, 0, 1], sampler_logprobs_N=sampler, teacher_logprobs_KN=[teacher], teacher_weights_KN=[[weight] * 3]
    )
    expected_N = weight * (floats(teacher) - floats(sampler))
    assert close(distilled_and_rewarded(inputs, reward_weight=0.0), expected_N)


def test_a_constant_baseline_is_subtracted_from_every_reward():
    inputs = advantage_inputs([1, -1, 1], [0, 0, 1])
    assert constant_baseline(inputs, baseline=0.25).tolist() == [0.75, -1.25, 0.75]


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_a_shift_of_rewards_and_of_the_constant_baseline_cancel(baseline, shift):
    plain = constant_baseline(advantage_inputs([1, 0.5]), baseline=baseline)
    shifted = constant_baseline(advantage_inputs([1 + shift, 0.5 + shift]), baseline=baseline + shift)
    assert torch.allclose(plain, shifted, atol=1e-12)
