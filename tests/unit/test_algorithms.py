"""Advantages, losses, reductions and divergences against numbers worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.algorithms import reductions
from roll_core.algorithms.advantages import group_normalized, group_relative
from roll_core.algorithms.catalog import Signal, build_algorithm
from roll_core.algorithms.divergences import k3
from roll_core.algorithms.inputs import AdvantageInputs, LossInputs
from roll_core.algorithms.losses import clipped_policy_gradient, cross_entropy
from roll_core.config.algorithm import Grpo


def advantage_inputs(rewards: list[float], groups: list[int], lengths: list[int] | None = None) -> AdvantageInputs:
    lengths_S = torch.tensor(lengths or [1] * len(rewards))
    return AdvantageInputs(
        rewards_S=torch.tensor(rewards, dtype=torch.float64),
        group_S=torch.tensor(groups),
        sequence_N=torch.arange(len(rewards)).repeat_interleave(lengths_S),
    )


def loss_inputs(
    policy: list[float],
    anchor: list[float],
    advantages: list[float],
    *,
    reference: list[float] | None = None,
    sequence: list[int] | None = None,
    mask: list[float] | None = None,
    entropies: list[float] | None = None,
    global_tokens: float | None = None,
    global_sequences: float | None = None,
) -> LossInputs:
    count = len(policy)
    sequence = sequence or [0] * count
    return LossInputs(
        policy_logprobs_N=torch.tensor(policy, dtype=torch.float64, requires_grad=True),
        entropies_N=torch.tensor(entropies or [0.0] * count, dtype=torch.float64),
        anchor_logprobs_N=torch.tensor(anchor, dtype=torch.float64),
        sampler_logprobs_N=torch.tensor(anchor, dtype=torch.float64),
        reference_logprobs_N=None if reference is None else torch.tensor(reference, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        mask_N=torch.tensor(mask or [1.0] * count, dtype=torch.float64),
        sequence_N=torch.tensor(sequence),
        num_sequences=max(sequence) + 1,
        global_tokens=global_tokens or float(count),
        global_sequences=global_sequences or float(max(sequence) + 1),
    )


def ppo(inputs: LossInputs, **changes: float):
    knobs = {"clip_low": 0.2, "clip_high": 0.28, "kl_coefficient": 0.0, "entropy_coefficient": 0.0} | changes
    return clipped_policy_gradient(inputs, **knobs, reduce=reductions.token_mean)


def test_group_relative_subtracts_the_mean_of_each_group():
    # group 0: mean of 1, 0, 0, 1 is 0.5; group 1: mean of 2, 4 is 3
    advantages = group_relative(advantage_inputs([1, 0, 0, 1, 2, 4], [0, 0, 0, 0, 1, 1]))
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]


def test_group_normalized_divides_by_the_unbiased_standard_deviation():
    # rewards 1, 0, 0, 1: deviations +-0.5, variance 4 * 0.25 / 3 = 1/3, std 0.57735
    advantages = group_normalized(advantage_inputs([1, 0, 0, 1], [0, 0, 0, 0]))
    assert advantages.tolist() == pytest.approx([0.866025, -0.866025, -0.866025, 0.866025], abs=1e-5)


def test_every_token_of_a_sequence_gets_its_advantage():
    advantages = group_relative(advantage_inputs([1, 0], [0, 0], lengths=[3, 1]))
    assert advantages.tolist() == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("advantage", [group_relative, group_normalized])
def test_equal_rewards_give_exactly_zero_even_when_their_mean_rounds(advantage):
    # the sum of three 0.1 is 0.30000000000000004: subtracting its third leaves a residue that must not be trained on
    assert advantage(advantage_inputs([0.1, 0.1, 0.1], [0, 0, 0])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("advantage", [group_relative, group_normalized])
def test_a_group_of_one_gets_zero(advantage):
    assert advantage(advantage_inputs([0.7], [0])).tolist() == [0.0]


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4), st.floats(-3, 3))
def test_group_relative_ignores_a_shift_of_all_rewards(rewards, shift):
    plain = group_relative(advantage_inputs(rewards, [0, 0, 1, 1]))
    shifted = group_relative(advantage_inputs([r + shift for r in rewards], [0, 0, 1, 1]))
    assert torch.allclose(plain, shifted, atol=1e-9)


@given(st.permutations(range(6)))
def test_group_advantages_follow_a_permutation_of_the_batch(order):
    rewards, groups = [1.0, 0.0, 0.5, 2.0, 2.0, 1.0], [0, 0, 0, 1, 1, 1]
    plain = group_normalized(advantage_inputs(rewards, groups))
    permuted = group_normalized(advantage_inputs([rewards[i] for i in order], [groups[i] for i in order]))
    assert torch.allclose(plain[list(order)], permuted)


def test_on_policy_the_clipped_loss_is_minus_the_mean_advantage():
    outputs = ppo(loss_inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, -3.0]))
    assert outputs.loss.item() == pytest.approx(1.0)  # -(1 - 3) / 2
    assert outputs.metric_sums["update/clip_fraction"].item() == 0.0


def test_on_policy_the_gradient_is_minus_advantage_over_tokens():
    inputs = loss_inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, -3.0])
    ppo(inputs).loss.backward()
    assert inputs.policy_logprobs_N.grad.tolist() == pytest.approx([-0.5, 1.5])


def test_ratios_outside_the_bounds_are_clipped_only_on_the_side_that_gains():
    # ratio 2 with A=1: min(2, 1.28) = 1.28, clipped; ratio 2 with A=-1: min(-2, -1.28) = -2, kept
    # ratio 0.5 with A=1: min(0.5, 0.8) = 0.5, kept; ratio 0.5 with A=-1: min(-0.5, -0.8) = -0.8, clipped
    log_2 = math.log(2.0)
    inputs = loss_inputs([log_2, log_2, -log_2, -log_2], [0.0] * 4, [1.0, -1.0, 1.0, -1.0])
    outputs = ppo(inputs)
    assert outputs.loss.item() == pytest.approx(-(1.28 - 2.0 + 0.5 - 0.8) / 4)
    assert outputs.metric_sums["update/clip_fraction"].item() == 2.0
    outputs.loss.backward()
    assert inputs.policy_logprobs_N.grad.tolist() == pytest.approx([0.0, 2.0 / 4, -0.5 / 4, 0.0])


def test_kl_to_the_reference_is_added_with_its_weight():
    # d = log 2 - 0: k3 = exp(-log 2) + log 2 - 1 = 0.193147
    inputs = loss_inputs([math.log(2.0)], [math.log(2.0)], [0.0], reference=[0.0])
    outputs = ppo(inputs, kl_coefficient=0.1)
    assert outputs.loss.item() == pytest.approx(0.0193147, abs=1e-6)
    assert outputs.metric_sums["update/kl_to_reference"].item() == pytest.approx(0.193147, abs=1e-6)


def test_the_entropy_bonus_lowers_the_loss():
    outputs = ppo(loss_inputs([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], entropies=[1.0, 3.0]), entropy_coefficient=0.5)
    assert outputs.loss.item() == pytest.approx(-1.0)


def test_a_masked_token_has_no_gradient_and_its_neighbours_are_not_strengthened():
    inputs = loss_inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0], mask=[1.0, 0.0])
    ppo(inputs).loss.backward()
    assert inputs.policy_logprobs_N.grad.tolist() == pytest.approx([-0.5, 0.0])


def test_cross_entropy_is_the_mean_negative_logprob_over_global_tokens():
    outputs = cross_entropy(loss_inputs([-1.0, -2.0], [0.0, 0.0], [0.0, 0.0], global_tokens=6.0))
    assert outputs.loss.item() == pytest.approx(0.5)  # 3 / 6


VALUES = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (reductions.token_mean, 16 / 4),
        (reductions.sequence_mean_token_sum, (6 + 10) / 2),
        (reductions.sequence_mean_token_mean, (2 + 10) / 2),
    ],
)
def test_reductions_over_two_sequences_of_three_and_one_tokens(reduction, expected):
    inputs = loss_inputs([0.0] * 4, [0.0] * 4, [0.0] * 4, sequence=[0, 0, 0, 1])
    assert reduction(VALUES, inputs).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "reduction", [reductions.token_mean, reductions.sequence_mean_token_sum, reductions.sequence_mean_token_mean]
)
def test_reductions_of_parts_add_up_to_the_whole(reduction):
    whole = reduction(VALUES, loss_inputs([0.0] * 4, [0.0] * 4, [0.0] * 4, sequence=[0, 0, 0, 1]))
    first = loss_inputs([0.0] * 3, [0.0] * 3, [0.0] * 3, global_tokens=4.0, global_sequences=2.0)
    second = loss_inputs([0.0], [0.0], [0.0], global_tokens=4.0, global_sequences=2.0)
    assert (reduction(VALUES[:3], first) + reduction(VALUES[3:], second)).item() == pytest.approx(whole.item())


def test_k3_by_hand():
    policy, other = torch.tensor([0.0, -1.0]), torch.tensor([-1.0, -1.0])
    assert k3(policy, other).tolist() == pytest.approx([math.exp(-1.0) + 1 - 1, 0.0])


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative_and_never_infinite(policy, other):
    value = k3(torch.tensor(policy), torch.tensor(other)).item()
    assert value >= -1e-6
    assert math.isfinite(value)


def test_grpo_declares_only_the_signals_it_needs():
    assert build_algorithm(Grpo(), 1).signals == frozenset()
    assert build_algorithm(Grpo(), 4).signals == {Signal.ANCHOR}
    assert build_algorithm(Grpo(kl_coefficient=0.01), 1).signals == {Signal.REFERENCE}


def test_grpo_skips_samples_without_gradient_only_when_nothing_else_pulls_on_them():
    assert build_algorithm(Grpo(), 1).skips_zero_advantages
    assert not build_algorithm(Grpo(entropy_coefficient=0.01), 1).skips_zero_advantages
    assert not build_algorithm(Grpo(kl_coefficient=0.01), 1).skips_zero_advantages
