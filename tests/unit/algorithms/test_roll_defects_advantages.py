"""Defects of the original ROLL in rewards and advantages that must not come back. Each test also computes the result of the
defect, to show that it differs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.algorithms.advantages import generalized_advantage, group_in_group
from roll_core.algorithms.credit import CreditState, assign_credit
from roll_core.algorithms.grouping import centred_by
from roll_core.algorithms.shaping import Moments, normalized
from roll_core.config.algorithm.shaping import NormalizeConfig, NormalizingConfig, StatisticsFrom
from tests.unit.algorithms.builders_advantages import (
    advantage_inputs,
    credit_inputs,
    credit_recipe,
    few,
    floats,
    outcome_only,
    picked,
    quarters,
    random_batches,
)

# Normalised rewards: a group's deviation with another mean gave a table of groups, and running statistics did not work.

REWARDS, GROUPS = floats([1, 4, 0, 2]), torch.tensor([0, 1, 0, 1])


def by_group_std(mean_from: StatisticsFrom) -> torch.Tensor:
    among = {"group_S": GROUPS, "domain_S": torch.zeros_like(GROUPS), "moments_D": []}
    return normalized(REWARDS, mean_from=mean_from, std_from=StatisticsFrom.GROUP, **among)


@pytest.mark.parametrize(
    ("mean_from", "mean", "expected"),
    [
        # groups 1, 0 and 4, 2: stds 0.707107 and 1.414214
        (StatisticsFrom.NONE, 0.0, [1.414214, 2.828427, 0.0, 1.414214]),  # 1, 4, 0, 2 over them
        (StatisticsFrom.BATCH, 1.75, [-1.060660, 1.590990, -2.474874, 0.176777]),  # -0.75, 2.25, -1.75, 0.25 over them
    ],
)
def test_a_groups_deviation_with_another_mean_gives_one_number_for_each_trajectory(mean_from, mean, expected):
    rewards_S = by_group_std(mean_from)
    assert rewards_S.shape == (4,)
    assert rewards_S.tolist() == pytest.approx(expected, abs=1e-5)
    table_22 = (REWARDS - mean).view(2, 2) / REWARDS.view(2, 2).std(dim=1, keepdim=True)
    assert table_22.shape != rewards_S.shape
    assert table_22.flatten().tolist() != pytest.approx(expected, abs=1e-2)  # groups are no rows of it: 1, 4 and 0, 2


@few
@given(st.permutations(range(4)))
def test_a_groups_deviation_does_not_depend_on_the_order_of_trajectories(order):
    among = {"group_S": GROUPS[order], "domain_S": torch.zeros_like(GROUPS), "moments_D": []}
    permuted_S = normalized(REWARDS[order], mean_from=StatisticsFrom.BATCH, std_from=StatisticsFrom.GROUP, **among)
    assert torch.allclose(permuted_S, by_group_std(StatisticsFrom.BATCH)[order])


def test_running_statistics_work_and_are_those_of_every_iteration_so_far():
    # first 0, 2, then 4, 6: mean 3, squares 9 + 1 + 1 + 9 = 20, std sqrt(20 / 3) = 2.581989: 1 and 3 over it
    # (statistics of the second batch alone, mean 5 and std 1.414214, would give -+0.707107)
    section = NormalizingConfig(normalize=NormalizeConfig(mean=StatisticsFrom.RUNNING, std=StatisticsFrom.RUNNING))
    recipe, state = credit_recipe(section, advantage=outcome_only), CreditState()
    for rewards in ([0, 2], [4, 6]):
        credit, state = assign_credit(credit_inputs(advantage_inputs(rewards)), recipe, state)
    assert credit.advantages_N.tolist() == pytest.approx([0.387298, 1.161895], abs=1e-5)
    assert state.moments == {"sort": Moments(count=4, mean=3, squares=20)}


# Generalised advantages: values of padding and of observations leaked into those of trained tokens.

DISCOUNT, DECAY = 0.9, 0.5


def leaking(rewards: list[float], values: list[float]) -> list[float]:
    """Advantages by a textbook loop along a row, as if every position of it held a trained token of one trajectory."""
    advantages, advantage, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + DISCOUNT * following - value + DISCOUNT * DECAY * advantage
        following = value
        advantages.append(advantage)
    return advantages[::-1]


def generalized(inputs, *, bootstrap: bool = False) -> list[float]:
    return generalized_advantage(inputs, discount=DISCOUNT, trace_decay=DECAY, bootstrap_truncated=bootstrap).tolist()


def test_values_at_padding_do_not_leak_into_generalized_advantages():
    # one token, then a row padded to three with values 0.3 of nothing: A = 1 - 0.2 = 0.8 of the token alone
    # leaking: d = 1 + 0.9 * 0.3 - 0.2 = 1.07, then + 0.45 * (0.9 * 0.3 - 0.3 + 0.45 * -0.3) = 1.07 - 0.07425
    inputs = advantage_inputs([1, 0], turns=[[1], [3]], values_N=[0.2, 0.1, 0.1, 0.1])
    assert generalized(inputs)[0] == pytest.approx(0.8)
    assert leaking([1, 0, 0], [0.2, 0.3, 0.3])[0] == pytest.approx(0.99575)


def test_values_of_other_sequences_do_not_leak_into_generalized_advantages():
    # sequence 0: 1 - 0.2; sequence 1: d = 0.9 * 0.4 - 0.6 = -0.24 and 2 - 0.4 = 1.6, A = -0.24 + 0.45 * 1.6
    inputs = advantage_inputs([1, 2], turns=[[1], [2]], values_N=[0.2, 0.6, 0.4])
    assert generalized(inputs) == pytest.approx([0.8, 0.48, 1.6])
    # leaking into the first: 0.8 + 0.9 * 0.6 (the next value) + 0.45 * 0.48 (the next advantage)
    assert leaking([1, 0, 2], [0.2, 0.6, 0.4])[0] == pytest.approx(1.556)


@few
@given(random_batches(), st.booleans(), st.data())
def test_generalized_advantages_of_a_trajectory_are_those_it_has_alone(batch, bootstrap, data):
    number = data.draw(st.integers(0, batch.num_sequences - 1))
    alone, tokens_N = picked(batch, [number])
    together = floats(generalized(batch, bootstrap=bootstrap))[tokens_N]
    assert torch.allclose(together, floats(generalized(alone, bootstrap=bootstrap)))


def test_after_an_observation_the_next_value_is_that_of_the_next_trained_token():
    # token, two of observation (values 5, 7), token: d = 0.9 * 0.4 - 0.6 = -0.24 and 1 - 0.4 = 0.6, A = -0.24 + 0.45 * 0.6
    inputs = advantage_inputs([1], turns=[[1, 1]], values_N=[0.6, 0.4])
    assert generalized(inputs) == pytest.approx([0.03, 0.6])
    # leaking: d = 0.9 * 5 - 0.6 = 3.9, 0.9 * 7 - 5 = 1.3, 0.9 * 0.4 - 7 = -6.64, 0.6
    # A = 3.9 + 0.45 * (1.3 + 0.45 * (-6.64 + 0.45 * 0.6)) = 3.9 + 0.45 * -1.5665
    through = leaking([0, 0, 0, 1], [0.6, 5, 7, 0.4])
    assert through[3] == pytest.approx(0.6)
    assert through[0] == pytest.approx(3.195075)


@few
@given(random_batches(), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_generalized_advantages_do_not_depend_on_how_unpaid_tokens_are_split_into_turns(batch, lengths):
    total = sum(lengths)
    values_N = batch.values_N.repeat(total)[:total].tolist()
    in_turns = advantage_inputs([1], turns=[lengths], values_N=values_N)
    assert generalized(in_turns) == generalized(advantage_inputs([1], turns=[[total]], values_N=values_N))


def test_the_value_after_the_last_token_counts_only_where_a_trajectory_was_cut_off():
    # ended: 1 - 0.2 = 0.8; cut off: 1 + 0.9 * 0.5 - 0.2 = 1.25. The values after the last tokens are 0.5 and 0.5
    inputs = advantage_inputs([1, 1], truncated=[False, True], values_N=[0.2, 0.2], final_values_S=[0.5, 0.5])
    assert generalized(inputs, bootstrap=True) == pytest.approx([0.8, 1.25])  # bootstrapped always, both were 1.25
    assert generalized(inputs, bootstrap=False) == pytest.approx([0.8, 0.8])


@few
@given(random_batches(), quarters)
def test_the_value_after_a_trajectory_that_ended_by_itself_is_never_used(batch, garbage):
    final_S = torch.where(batch.truncated_S, batch.final_values_S, torch.full_like(batch.final_values_S, garbage))
    changed = replace(batch, final_values_S=final_S)
    assert generalized(changed, bootstrap=True) == generalized(batch, bootstrap=True)


# GiGPO: equal states of different problems were compared.


def steps_alone(inputs, *, scale_by_std: bool = False) -> torch.Tensor:
    return group_in_group(inputs, discount=1.0, episode_weight=0.0, step_weight=1.0, scale_by_std=scale_by_std)


def test_equal_states_of_different_problems_are_not_compared():
    # two problems of two trajectories, one turn each, all from state 0. Problem 0: 1, 0: +-0.5. Problem 1: 10, 8: +-1
    inputs = advantage_inputs([1, 0, 10, 8], [0, 0, 1, 1], states=[[0], [0], [0], [0]])
    assert steps_alone(inputs).tolist() == [0.5, -0.5, 1.0, -1.0]
    # by state alone, mean 4.75: the easy problem's worse turn would be praised, the hard one's better blamed
    merged = centred_by(inputs.rewards_S, inputs.state_T, 1)
    assert merged.tolist() == [-3.75, -4.75, 5.25, 3.25]


def test_a_state_met_by_one_trajectory_of_each_problem_gives_no_step_advantage():
    # state 7 is met once in each problem: nothing to compare with. (By state alone, 1 and 0 would give +-0.5.)
    inputs = advantage_inputs([1, 0], [0, 1], states=[[7], [7]])
    assert steps_alone(inputs).tolist() == [0.0, 0.0]


def test_steps_are_divided_by_their_deviation_exactly_when_the_algorithm_says_so():
    # 1, 0: std 0.707107
    inputs = advantage_inputs([1, 0])
    assert steps_alone(inputs, scale_by_std=True).tolist() == pytest.approx([0.707107, -0.707107], abs=1e-5)
    assert steps_alone(inputs, scale_by_std=False).tolist() == [0.5, -0.5]


@few
@given(random_batches())
def test_states_with_different_numbers_for_each_problem_change_nothing(batch):
    apart = replace(batch, state_T=batch.state_T + 10 * batch.group_S[batch.sequence_T])
    assert torch.equal(steps_alone(apart), steps_alone(batch))


@few
@given(random_batches(), quarters)
def test_the_rewards_of_one_problem_do_not_change_the_steps_of_another(batch, bonus):
    is_other_S = batch.group_S != 0
    paid = replace(batch, rewards_S=batch.rewards_S + bonus * is_other_S)
    unmoved_N = ~is_other_S[batch.sequence_N]
    assert torch.equal(steps_alone(paid)[unmoved_N], steps_alone(batch)[unmoved_N])
