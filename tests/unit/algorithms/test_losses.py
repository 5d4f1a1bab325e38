"""Objectives and the policy loss: values worked by hand, and properties that hold for any values."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll_core.algorithms import divergences, losses, reductions
from roll_core.algorithms.inputs import LossInputs, Objective
from roll_core.config.algorithm.correction import CorrectionLevel
from roll_core.config.algorithm.policy_update import RatioLevel
from tests.unit.algorithms.builders_losses import (
    CORRECTIONS,
    LAYOUT,
    OBJECTIVES,
    PPO,
    REDUCTIONS,
    correction,
    gradient,
    layouts,
    loss_inputs,
    policy_gradient_of,
    random_loss_inputs,
    seeds,
    selected,
)

LOG_2 = math.log(2.0)
PG = losses.policy_gradient
NO_CLIP = partial(losses.clipped_ratio, clip_low=1e9, clip_high=1e9)
any_objective = st.sampled_from(list(OBJECTIVES.values()))
any_reduction = st.sampled_from(list(REDUCTIONS.values()))
REGULARIZED = {"kl_coefficient": 0.2, "entropy_coefficient": 0.1}
TOKEN_BY_TOKEN = ("policy_gradient", "ppo", "dual_clip", "tis", "cispo", "cispo_masked", "kimi_of_tokens")


def on_policy(inputs: LossInputs) -> LossInputs:
    policy_N = inputs.policy_logprobs_N.detach()
    return replace(inputs, anchor_logprobs_N=policy_N, sampler_logprobs_N=policy_N)


def with_one_advantage_a_sequence(inputs: LossInputs) -> LossInputs:
    return replace(inputs, advantages_N=inputs.advantages_N[: inputs.num_sequences][inputs.sequence_N])


def loss_and_gradient(
    inputs: LossInputs, objective: Objective, reduce=reductions.token_mean, **terms
) -> tuple[Tensor, Tensor]:
    loss = losses.policy_loss(inputs, objective=objective, reduce=reduce, **terms).loss
    return loss.detach(), gradient(loss, inputs.policy_logprobs_N)


def are_close(ones: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(one, other, atol=1e-12) for one, other in zip(ones, others, strict=True))


# Objectives, by hand


def test_policy_gradient_is_minus_advantage_times_logprob():
    tokens = losses.policy_gradient(loss_inputs(policy=[-1.0, -2.0], advantages=[1.0, -3.0]))
    assert tokens.loss_N.tolist() == [1.0, -6.0]
    assert tokens.clipped_N.tolist() == [False, False]


def test_ratios_outside_the_bounds_are_clipped_only_on_the_side_that_gains():
    # ratio 2, A=1: min(2, 1.28) = 1.28, clipped; ratio 2, A=-1: min(-2, -1.28) = -2, kept
    # ratio 0.5, A=1: min(0.5, 0.8) = 0.5, kept; ratio 0.5, A=-1: min(-0.5, -0.8) = -0.8, clipped
    inputs = loss_inputs(
        policy=[LOG_2, LOG_2, -LOG_2, -LOG_2], anchor=[0.0] * 4, advantages=[1.0, -1.0, 1.0, -1.0], sampler=[-9.0] * 4
    )
    tokens = PPO(inputs)
    assert tokens.loss_N.tolist() == pytest.approx([-1.28, 2.0, -0.5, 0.8])
    assert tokens.clipped_N.tolist() == [True, False, False, True]
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([0.0, 2.0, -0.5, 0.0])


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone():
    # A=-1, ratio 4: min(-4, -1.28) = -4, bounded at 3 * -1; ratio 2: -2 stands. A=1, ratio 4: clipped at 1.28 as ever
    inputs = loss_inputs(policy=[2 * LOG_2, LOG_2, 2 * LOG_2], anchor=[0.0] * 3, advantages=[-1.0, -1.0, 1.0])
    tokens = PPO(inputs, dual_clip=3.0)
    assert tokens.loss_N.tolist() == pytest.approx([3.0, 2.0, -1.28])
    assert tokens.clipped_N.tolist() == [True, False, True]
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([0.0, 2.0, 0.0])


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    # ratios 4 and 1: sqrt(4 * 1) = 2 for both; d(-2 - 2) / dlogprob = -(2 + 2) / 2 each. Ratio 3 alone: 3.
    inputs = loss_inputs(policy=[2 * LOG_2, 0.0, math.log(3.0)], anchor=[0.0] * 3, layout=((1, 1), (1,)))
    tokens = NO_CLIP(inputs, level=RatioLevel.SEQUENCE)
    assert tokens.loss_N.tolist() == pytest.approx([-2.0, -2.0, -3.0])
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([-2.0, -2.0, -3.0])


def test_the_ratio_of_a_turn_is_the_geometric_mean_of_its_tokens():
    # turn one: sqrt(4 * 1) = 2; turn two: 3; clipped at 1 + 1.5
    inputs = loss_inputs(policy=[2 * LOG_2, 0.0, math.log(3.0)], anchor=[0.0] * 3, layout=((2, 1),))
    tokens = losses.clipped_ratio(inputs, clip_low=0.2, clip_high=1.5, level=RatioLevel.TURN)
    assert tokens.loss_N.tolist() == pytest.approx([-2.0, -2.0, -2.5])
    assert tokens.clipped_N.tolist() == [False, False, True]


def test_a_token_of_a_sequence_ratio_keeps_its_own_advantage_in_the_gradient():
    # advantages of 1 and -1 on policy, mean over two tokens: the shared ratio alone would give both their mean, 0
    inputs = loss_inputs(policy=[-1.0, -2.0], advantages=[1.0, -1.0])
    tokens = losses.clipped_shared_ratio(inputs, clip_low=0.1, clip_high=0.1, level=RatioLevel.SEQUENCE)
    assert tokens.loss_N.tolist() == pytest.approx([-1.0, 1.0])
    assert policy_gradient_of(tokens.loss_N.mean(), inputs) == pytest.approx([-0.5, 0.5])


def test_a_masked_token_does_not_count_in_the_ratio_of_its_sequence():
    # ratios 4, 1 and a masked 100. GSPO: still sqrt(4 * 1). TOPR, bounded at 50: 4 * 1. Kimi: (log 4 + log 1)^2 / 2 tokens
    inputs = loss_inputs(
        policy=[2 * LOG_2, 1.0, math.log(100.0)], anchor=[0.0, 1.0, 0.0], advantages=[-1.0] * 3, mask=[1.0, 1.0, 0.0]
    )
    gspo = NO_CLIP(inputs, level=RatioLevel.SEQUENCE)
    topr = losses.tapered_off_policy(inputs, positive_weight=1.0, negative_weight=1.0, lower=0.0, upper=50.0)
    kimi = losses.mirror_descent(inputs, temperature=2.0, level=RatioLevel.SEQUENCE)
    assert gspo.loss_N[:2].tolist() == pytest.approx([2.0, 2.0])
    assert topr.loss_N[:2].tolist() == pytest.approx([4 * 2 * LOG_2, 4.0])
    assert kimi.loss_N[:2].tolist() == pytest.approx([2 * LOG_2 + (2 * LOG_2) ** 2 / 2, 1 + (2 * LOG_2) ** 2 / 2])


def test_truncated_importance_weights_are_those_against_the_sampler():
    # pi / sampler = 2, 0.5, 0.1; within [0.25, 1]: 1, 0.5, 0.25; times -A log pi = -3 * -1
    inputs = loss_inputs(
        policy=[-1.0] * 3, anchor=[-9.0] * 3, sampler=[-1 - LOG_2, -1 + LOG_2, -1 + math.log(10.0)], advantages=[3.0] * 3
    )
    tokens = losses.truncated_importance_sampling(inputs, lower=0.25, upper=1.0)
    assert tokens.loss_N.tolist() == pytest.approx([3.0, 1.5, 0.75])
    assert tokens.clipped_N.tolist() == [True, False, True]
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([-3.0, -1.5, -0.75])


def cispo_inputs() -> LossInputs:
    return loss_inputs(
        policy=[LOG_2 - 1, LOG_2 - 1, -LOG_2 - 1, -LOG_2 - 1], anchor=[-1.0] * 4, advantages=[1.0, -1.0, 1.0, -1.0]
    )


def test_clipped_importance_weights_keep_the_gradient_of_every_token():
    # ratios 2, 2, 0.5, 0.5, within [0.8, 1.28]: 1.28, 1.28, 0.8, 0.8; gradient -weight * A
    inputs = cispo_inputs()
    tokens = losses.clipped_importance_sampling(inputs, clip_low=0.2, clip_high=0.28, mask_clipped=False)
    expected = [-1.28 * (LOG_2 - 1), 1.28 * (LOG_2 - 1), -0.8 * (-LOG_2 - 1), 0.8 * (-LOG_2 - 1)]
    assert tokens.loss_N.tolist() == pytest.approx(expected)
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([-1.28, 1.28, -0.8, 0.8])


def test_masking_clipped_importance_weights_removes_the_tokens_that_ppo_clips():
    # PPO clips (ratio 2, A=1) and (ratio 0.5, A=-1)
    inputs = cispo_inputs()
    tokens = losses.clipped_importance_sampling(inputs, clip_low=0.2, clip_high=0.28, mask_clipped=True)
    assert PPO(inputs).clipped_N.tolist() == [True, False, False, True]
    assert tokens.clipped_N.tolist() == [True] * 4  # the bounds changed every weight
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([0.0, 1.28, -0.8, 0.0])


def test_tapering_weighs_wrong_sequences_by_the_product_of_their_ratios():
    # sequence one, A=-1: 1/2 * 1/2 = 1/4, times w- = 2: 0.5. Two, A=-1: 2 * 2 = 4, at most 1, times 2: 2. Three, A=1: w+ = 3
    policy, sampler = [-1.0] * 5, [-1 + LOG_2, -1 + LOG_2, -1 - LOG_2, -1 - LOG_2, -9.0]
    inputs = loss_inputs(
        policy=policy, anchor=[-9.0] * 5, sampler=sampler, advantages=[-1.0] * 4 + [1.0], layout=((2,), (1, 1), (1,))
    )
    tokens = losses.tapered_off_policy(inputs, positive_weight=3.0, negative_weight=2.0, lower=0.0, upper=1.0)
    assert tokens.loss_N.tolist() == pytest.approx([-0.5, -0.5, -2.0, -2.0, 3.0])
    assert tokens.clipped_N.tolist() == [False, False, True, True, False]
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([0.5, 0.5, 2.0, 2.0, -3.0])


@pytest.mark.parametrize(
    ("level", "penalties"),
    [
        # log ratios 0.1, 0.3, 0.2; tau / 2 = 0.25; a shared square is divided equally among its tokens
        (RatioLevel.TOKEN, [0.25 * 0.01, 0.25 * 0.09, 0.25 * 0.04]),
        (RatioLevel.TURN, [0.25 * 0.16 / 2, 0.25 * 0.16 / 2, 0.25 * 0.04]),
        (RatioLevel.SEQUENCE, [0.25 * 0.36 / 3] * 3),
    ],
)
def test_mirror_descent_penalizes_the_square_of_the_log_ratio(level, penalties):
    inputs = loss_inputs(policy=[-1.0] * 3, anchor=[-1.1, -1.3, -1.2], advantages=[2.0] * 3, layout=((2, 1),))
    tokens = losses.mirror_descent(inputs, temperature=0.5, level=level)
    assert tokens.loss_N.tolist() == pytest.approx([2.0 + penalty for penalty in penalties])


def test_mirror_descent_pulls_every_token_of_a_sequence_by_the_whole_log_ratio():
    # d (tau / 2 * (0.1 + 0.3)^2) / dlogprob = tau * 0.4 = 0.2 for each token
    inputs = loss_inputs(policy=[-1.0, -1.0], anchor=[-1.1, -1.3], advantages=[0.0, 0.0])
    tokens = losses.mirror_descent(inputs, temperature=0.5, level=RatioLevel.SEQUENCE)
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize("level", list(RatioLevel))
def test_mirror_descent_pulls_to_the_anchor_however_far_away_it_is(level):
    # d/dlogprob (-A logprob + tau / 2 d^2) = 1 + 0.1 * -11 = -0.1 for A = -1: descent raises the logprob
    inputs = loss_inputs(policy=[-12.0], anchor=[-1.0], advantages=[-1.0])
    tokens = losses.mirror_descent(inputs, temperature=0.1, level=level)
    assert policy_gradient_of(tokens.loss_N.sum(), inputs) == pytest.approx([-0.1])


def test_a_ratio_that_overflows_is_bounded():
    # e^(1000) would be infinite; the log ratio is kept within 10
    inputs = loss_inputs(policy=[0.0], anchor=[-1000.0], advantages=[-1.0])
    assert PPO(inputs).loss_N.tolist() == pytest.approx([math.exp(10.0)])


# The loss, by hand


def test_on_policy_the_clipped_loss_is_minus_the_mean_advantage():
    inputs = loss_inputs(policy=[-1.0, -2.0], advantages=[1.0, -3.0])
    outputs = losses.policy_loss(inputs, objective=PPO, reduce=reductions.token_mean)
    assert outputs.loss.item() == pytest.approx(1.0)  # -(1 - 3) / 2
    assert policy_gradient_of(outputs.loss, inputs) == pytest.approx([-0.5, 1.5])


def test_kl_to_the_reference_is_added_with_its_weight():
    # d = log 2: k3 = 1/2 + log 2 - 1 = 0.193147, times 0.1; k2 = (log 2)^2 / 2 = 0.240227, times 0.1
    inputs = loss_inputs(policy=[LOG_2], advantages=[0.0], reference=[0.0])
    for estimator, expected in ((divergences.k3, 0.193147), (divergences.k2, 0.240227)):
        outputs = losses.policy_loss(
            inputs,
            objective=losses.policy_gradient,
            reduce=reductions.token_mean,
            kl_coefficient=0.1,
            kl_estimator=estimator,
        )
        assert outputs.loss.item() == pytest.approx(0.1 * expected, abs=1e-6)
        assert outputs.metric_sums["update/kl_to_reference"].item() == pytest.approx(expected, abs=1e-6)


def test_a_given_divergence_is_taken_instead_of_an_estimate():
    # 0.1 * (1 + 3) / 2
    inputs = loss_inputs(policy=[0.0, 0.0], advantages=[0.0, 0.0], reference=[-5.0, -5.0], divergences=[1.0, 3.0])
    outputs = losses.policy_loss(inputs, objective=losses.policy_gradient, reduce=reductions.token_mean, kl_coefficient=0.1)
    assert outputs.loss.item() == pytest.approx(0.2)


def test_the_entropy_bonus_lowers_the_loss():
    inputs = loss_inputs(policy=[0.0, 0.0], entropies=[1.0, 3.0])  # -0.5 * (1 + 3) / 2
    outputs = losses.policy_loss(
        inputs, objective=losses.policy_gradient, reduce=reductions.token_mean, entropy_coefficient=0.5
    )
    assert outputs.loss.item() == pytest.approx(-1.0)


def test_weights_multiply_the_objective_but_neither_kl_nor_entropy():
    # objective: (2 * 1 + 3 * 1) / 2 = 2.5; KL: 0.1 * (1 + 1) / 2 = 0.1; entropy: -0.5 * (1 + 3) / 2 = -1
    inputs = loss_inputs(policy=[-1.0, -1.0], divergences=[1.0, 1.0], entropies=[1.0, 3.0])
    inputs = replace(inputs, weights_N=torch.tensor([2.0, 3.0], dtype=torch.float64))
    outputs = losses.policy_loss(
        inputs,
        objective=losses.policy_gradient,
        reduce=reductions.token_mean,
        kl_coefficient=0.1,
        entropy_coefficient=0.5,
    )
    assert outputs.loss.item() == pytest.approx(2.5 + 0.1 - 1.0)


def test_metrics_are_sums_over_the_tokens_that_count():
    # tokens one and three count: ratios 2 (A=1, clipped) and 1; k3 of -log 2 is 2 - log 2 - 1, of -2 log 2: 4 - 2 log 2 - 1
    inputs = loss_inputs(
        policy=[LOG_2, LOG_2, 0.0],
        anchor=[0.0] * 3,
        sampler=[-LOG_2, 0.0, 0.0],
        entropies=[1.0, 10.0, 2.0],
        mask=[1.0, 0.0, 1.0],
    )
    sums = losses.policy_loss(inputs, objective=PPO, reduce=reductions.token_mean).metric_sums
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {
            "update/clip_fraction": 1.0,
            "update/entropy": 3.0,
            "update/kl_to_anchor": 1 - LOG_2,
            "update/kl_to_sampler": 3 - 2 * LOG_2,
        },
        abs=1e-6,
    )


def test_cross_entropy_is_the_mean_negative_logprob_over_global_tokens():
    inputs = loss_inputs(policy=[-1.0, -2.0, -7.0], mask=[1.0, 1.0, 0.0], entropies=[0.5, 0.25, 9.0], global_tokens=6.0)
    outputs = losses.cross_entropy(inputs)
    assert outputs.loss.item() == pytest.approx(0.5)  # (1 + 2) / 6
    assert policy_gradient_of(outputs.loss, inputs) == pytest.approx([-1 / 6, -1 / 6, 0.0])
    assert outputs.metric_sums["warm_start/entropy"].item() == 0.75


# Properties that hold for any values


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@given(seed=seeds, layout=layouts, reduce=any_reduction)
@settings(max_examples=50, deadline=None)
def test_a_masked_token_has_neither_gradient_nor_influence(objective, seed, layout, reduce):
    inputs = random_loss_inputs(seed, layout, masked_share=0.4)
    is_masked_N = inputs.mask_N == 0
    noise = random_loss_inputs(seed + 1, layout, spread=3.0)
    names = [name for name, value in vars(noise).items() if isinstance(value, torch.Tensor) and name != "mask_N"]
    other = replace(inputs, **{name: torch.where(is_masked_N, vars(noise)[name], vars(inputs)[name]) for name in names})
    loss, gradient_N = loss_and_gradient(inputs, objective, reduce, **REGULARIZED)
    assert (gradient_N[is_masked_N] == 0).all()
    assert torch.equal(loss, losses.policy_loss(other, objective=objective, reduce=reduce, **REGULARIZED).loss)


@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
@given(seed=seeds, layout=layouts, reduce=any_reduction)
@settings(max_examples=50, deadline=None)
def test_masking_a_token_does_not_change_the_gradient_of_the_others(name, seed, layout, reduce):
    masked = random_loss_inputs(seed, layout, masked_share=0.4)
    whole = replace(masked, mask_N=torch.ones_like(masked.mask_N))
    masked_N, whole_N = (loss_and_gradient(each, OBJECTIVES[name], reduce, **REGULARIZED)[1] for each in (masked, whole))
    assert torch.equal(masked_N, whole_N * masked.mask_N)


@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@given(seed=seeds, layout=layouts, data=st.data())
@settings(max_examples=10, deadline=None)
def test_no_way_of_cutting_a_batch_into_micro_batches_changes_loss_gradient_or_metrics(
    objective, reduce, seed, layout, data
):
    inputs = random_loss_inputs(seed, layout, masked_share=0.2)
    compute = partial(
        losses.policy_loss,
        objective=objective,
        reduce=reduce,
        correction=data.draw(st.sampled_from(list(CORRECTIONS.values()))),
        **REGULARIZED,
    )
    order = data.draw(st.permutations(range(len(layout))))
    cut = data.draw(st.integers(0, len(order)))
    parts = [compute(selected(inputs, part)) for part in (order[:cut], order[cut:]) if part]
    whole = compute(inputs)
    total = sum(part.loss for part in parts)
    assert torch.allclose(total, whole.loss, atol=1e-12)
    total_N, whole_N = (gradient(loss, inputs.policy_logprobs_N) for loss in (total, whole.loss))
    assert torch.allclose(total_N, whole_N, atol=1e-12)
    for name, value in whole.metric_sums.items():
        assert torch.allclose(sum(part.metric_sums[name] for part in parts), value, atol=1e-12)


@given(seed=seeds, layout=layouts, objective=any_objective, reduce=any_reduction, data=st.data())
@settings(max_examples=50, deadline=None)
def test_the_order_of_sequences_does_not_matter(seed, layout, objective, reduce, data):
    inputs = random_loss_inputs(seed, layout, masked_share=0.2)
    shuffled = selected(inputs, data.draw(st.permutations(range(len(layout)))))
    loss = losses.policy_loss(shuffled, objective=objective, reduce=reduce, **REGULARIZED).loss
    found = loss.detach(), gradient(loss, inputs.policy_logprobs_N)
    assert are_close(found, loss_and_gradient(inputs, objective, reduce, **REGULARIZED))


@given(seed=seeds, layout=layouts, data=st.data())
@settings(max_examples=50, deadline=None)
def test_cross_entropy_does_not_depend_on_how_a_batch_is_cut(seed, layout, data):
    inputs = random_loss_inputs(seed, layout, masked_share=0.3)
    cut = data.draw(st.integers(0, len(layout)))
    order = data.draw(st.permutations(range(len(layout))))
    total = sum(losses.cross_entropy(selected(inputs, part)).loss for part in (order[:cut], order[cut:]) if part)
    assert torch.allclose(total, losses.cross_entropy(inputs).loss)
    assert torch.allclose(gradient(total, inputs.policy_logprobs_N), -inputs.mask_N / inputs.global_tokens)


# Limits at which a method becomes a simpler one


@given(seed=seeds, layout=layouts)
@settings(max_examples=50, deadline=None)
def test_ppo_without_a_clip_is_the_importance_weighted_gain(seed, layout):
    inputs = random_loss_inputs(seed, layout)
    ratio_N = (inputs.policy_logprobs_N - inputs.anchor_logprobs_N).exp()
    tokens = NO_CLIP(inputs)
    assert torch.allclose(tokens.loss_N, -ratio_N * inputs.advantages_N)
    assert not tokens.clipped_N.any()


@given(seed=seeds, count=st.integers(1, 6), reduce=any_reduction)
@settings(max_examples=50, deadline=None)
def test_with_one_token_a_sequence_gspo_is_grpo(seed, count, reduce):
    inputs = random_loss_inputs(seed, [[1]] * count)
    gspo = loss_and_gradient(inputs, partial(PPO, level=RatioLevel.SEQUENCE), reduce)
    assert are_close(gspo, loss_and_gradient(inputs, PPO, reduce))


@pytest.mark.parametrize("objective", [PPO, partial(losses.mirror_descent, temperature=0.3)], ids=["ratio", "kimi"])
@given(seed=seeds, lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_with_one_turn_a_sequence_turn_level_is_sequence_level(objective, seed, lengths):
    inputs = random_loss_inputs(seed, [[length] for length in lengths], masked_share=0.2)
    by_turn = loss_and_gradient(inputs, partial(objective, level=RatioLevel.TURN))
    assert are_close(by_turn, loss_and_gradient(inputs, partial(objective, level=RatioLevel.SEQUENCE)))


@pytest.mark.parametrize(
    "objective",
    [
        partial(losses.truncated_importance_sampling, lower=0.0, upper=1.0),
        partial(losses.tapered_off_policy, positive_weight=1.0, negative_weight=1.0, lower=0.0, upper=1.0),
        OBJECTIVES["cispo"],
        OBJECTIVES["cispo_masked"],
        OBJECTIVES["kimi"],
    ],
    ids=["tis", "topr", "cispo", "cispo_masked", "kimi"],
)
@given(seed=seeds, layout=layouts, reduce=any_reduction)
@settings(max_examples=50, deadline=None)
def test_on_policy_weights_and_penalties_vanish_and_the_policy_gradient_is_left(objective, seed, layout, reduce):
    inputs = on_policy(random_loss_inputs(seed, layout, masked_share=0.2))
    assert are_close(loss_and_gradient(inputs, objective, reduce), loss_and_gradient(inputs, PG, reduce))


@pytest.mark.parametrize("name", ["ppo", "dual_clip", "gspo", "gspo_token"])
@given(seed=seeds, layout=layouts, reduce=any_reduction)
@settings(max_examples=50, deadline=None)
def test_on_policy_a_clipped_ratio_has_the_gradient_of_the_policy_gradient(name, seed, layout, reduce):
    inputs = with_one_advantage_a_sequence(on_policy(random_loss_inputs(seed, layout)))
    inputs = replace(inputs, weights_N=torch.ones_like(inputs.weights_N))
    found_N, expected_N = (loss_and_gradient(inputs, each, reduce)[1] for each in (OBJECTIVES[name], PG))
    assert torch.allclose(found_N, expected_N, atol=1e-12)


@pytest.mark.parametrize("dual_clip", [None, 1.05])
@given(seed=seeds, layout=layouts, reduce=any_reduction)
@settings(max_examples=50, deadline=None)
def test_with_one_advantage_a_sequence_gspo_token_is_gspo(dual_clip, seed, layout, reduce):
    inputs = with_one_advantage_a_sequence(random_loss_inputs(seed, layout, masked_share=0.2))
    inputs = replace(inputs, weights_N=torch.ones_like(inputs.weights_N))
    by_token, by_sequence = (partial(OBJECTIVES[name], dual_clip=dual_clip) for name in ("gspo_token", "gspo"))
    assert are_close(loss_and_gradient(inputs, by_token, reduce), loss_and_gradient(inputs, by_sequence, reduce))


@pytest.mark.parametrize("level", list(RatioLevel))
@given(seed=seeds, layout=layouts)
@settings(max_examples=50, deadline=None)
def test_mirror_descent_without_temperature_is_the_policy_gradient(level, seed, layout):
    inputs = random_loss_inputs(seed, layout)
    objective = partial(losses.mirror_descent, temperature=0.0, level=level)
    assert are_close(loss_and_gradient(inputs, objective), loss_and_gradient(inputs, PG))


@given(seed=seeds, layout=layouts)
@settings(max_examples=50, deadline=None)
def test_decoupled_ppo_is_ppo_where_the_anchor_is_the_sampler(seed, layout):
    inputs = random_loss_inputs(seed, layout)
    inputs = replace(inputs, sampler_logprobs_N=inputs.anchor_logprobs_N)
    decoupled = loss_and_gradient(inputs, PPO, correction=correction(level=CorrectionLevel.TOKEN, upper=None))
    assert are_close(decoupled, loss_and_gradient(inputs, PPO))


@given(seed=seeds, layout=layouts)
@settings(max_examples=50, deadline=None)
def test_decoupled_ppo_without_a_clip_weighs_by_the_ratio_to_the_sampler(seed, layout):
    # anchor / sampler * pi / anchor = pi / sampler
    inputs = random_loss_inputs(seed, layout)
    loss, _ = loss_and_gradient(inputs, NO_CLIP, correction=correction(level=CorrectionLevel.TOKEN, upper=None))
    ratio_N = (inputs.policy_logprobs_N - inputs.sampler_logprobs_N).exp()
    assert torch.allclose(loss, -(inputs.weights_N * ratio_N * inputs.advantages_N).mean())


def test_tapering_forgets_wrong_answers_the_policy_no_longer_gives():
    # the policy gives the whole answer e^-8 as often as the sampler did, each token e^-1 as often
    inputs = random_loss_inputs(0, ((8,),), spread=0.0)
    inputs = replace(inputs, sampler_logprobs_N=inputs.sampler_logprobs_N + 1, advantages_N=-torch.ones_like(inputs.mask_N))
    loss_N = losses.tapered_off_policy(inputs, positive_weight=1.0, negative_weight=1.0, lower=0.0, upper=1.0).loss_N
    assert policy_gradient_of(loss_N.sum(), inputs) == pytest.approx([math.exp(-8.0)] * 8)


def test_the_layout_of_the_random_inputs_has_sequences_of_several_turns():
    inputs = random_loss_inputs(0)
    assert (inputs.num_sequences, inputs.num_turns, len(inputs.mask_N)) == (3, 6, sum(map(sum, LAYOUT)))
