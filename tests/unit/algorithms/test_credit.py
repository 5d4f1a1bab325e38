"""Credit of graded trajectories: the order of its steps, sections by domain, and the state between iterations."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll_core.algorithms.advantages import (
    generalized_advantage,
    greedy_baseline,
    group_normalized,
    group_relative,
    monte_carlo_return,
    turn_return,
)
from roll_core.algorithms.credit import CreditInputs, CreditRecipe, CreditState, assign_credit
from roll_core.algorithms.divergences import k1, k2
from roll_core.algorithms.shaping import Moments
from roll_core.config.algorithm.shaping import (
    AdaptiveKlConfig,
    KlEstimator,
    KlRewardConfig,
    MasksConfig,
    NormalizeConfig,
    NormalizingConfig,
    OverlongConfig,
    SampleWeightsConfig,
    ShapingConfig,
    StatisticsFrom,
    WeightRange,
)
from tests.unit.algorithms.builders_advantages import (
    advantage_inputs,
    credit_inputs,
    credit_recipe,
    few,
    floats,
    outcome_only,
    quarters,
    random_batches,
    token_rewards_only,
)

RUNNING = NormalizeConfig(mean=StatisticsFrom.RUNNING, std=StatisticsFrom.RUNNING)
BATCH = NormalizeConfig(mean=StatisticsFrom.BATCH, std=StatisticsFrom.BATCH)
KL = KlRewardConfig(coefficient=0.1)
EVERYTHING = NormalizingConfig(
    normalize=RUNNING,
    reward_clip=1.5,
    overlong=OverlongConfig(buffer_tokens=8),
    kl=KlRewardConfig(coefficient=0.1, adaptive=AdaptiveKlConfig(target=0.5, horizon=10)),
    masks=MasksConfig(truncated=True, max_accuracy=1.0),
    weights=SampleWeightsConfig(difficulty=WeightRange(first=0.5, last=2.0), length=WeightRange(first=1.5, last=0.5)),
)


def credited(inputs: CreditInputs, recipe: CreditRecipe):
    return assign_credit(inputs, recipe, CreditState())[0]


def shaped(inputs: CreditInputs, shaping: ShapingConfig, **changes) -> list[float]:
    """Shaped reward of the trajectory of each token."""
    return credited(inputs, credit_recipe(shaping, advantage=outcome_only, **changes)).advantages_N.tolist()


@st.composite
def random_inputs(draw: st.DrawFn) -> CreditInputs:
    """Random batch of two domains, with anchor and reference logprobs."""
    outcomes = draw(random_batches(pays_tokens=False))
    flags = st.lists(st.integers(0, 1), min_size=6, max_size=6)
    count = outcomes.num_sequences
    correct, domain = draw(flags)[:count], draw(flags)[:count]
    anchor_N = outcomes.values_N.tolist()
    inputs = credit_inputs(outcomes, domain=domain, domains=("math", "sort"), reference_logprobs_N=[0.0] * len(anchor_N))
    return replace(inputs, correct_S=torch.tensor(correct).bool(), anchor_logprobs_N=floats(anchor_N))


# The order.


def test_without_shaping_credit_is_the_advantage_and_all_trajectories_count_the_same():
    outcomes = advantage_inputs([1, 0], turns=[[2], [1]])
    credit, state = assign_credit(credit_inputs(outcomes), credit_recipe(), CreditState())
    assert credit.advantages_N.tolist() == [0.5, 0.5, -0.5]
    assert credit.returns_N is None
    assert credit.kept_S.tolist() == [True, True]
    assert credit.weights_S.tolist() == [1, 1]
    assert state == CreditState()


@few
@given(random_inputs())
def test_an_empty_section_changes_nothing(inputs):
    credit = credited(inputs, credit_recipe(domains={"sort": ShapingConfig()}, advantage=monte_carlo_return))
    assert torch.equal(credit.advantages_N, monte_carlo_return(inputs.outcomes))
    assert bool(credit.kept_S.all())
    assert bool((credit.weights_S == 1).all())


def test_rewards_are_penalised_for_length_then_normalised_then_clipped():
    # lengths 10 and 6 of 10, buffer 4: 1 - 1 = 0 and 1; mean 0.5, std 0.707107: -+0.707107; clipped: -+0.5
    # (normalised first, equal rewards give -1 and 0, clipped -0.5 and 0; clipped first, 0 and 0.5 give -+0.707107)
    inputs = credit_inputs(advantage_inputs([1, 1], turns=[[10], [6]]))
    shaping = NormalizingConfig(overlong=OverlongConfig(buffer_tokens=4), normalize=BATCH, reward_clip=0.5)
    assert shaped(inputs, shaping) == [-0.5] * 10 + [0.5] * 6
    assert shaped(inputs, shaping.model_copy(update={"reward_clip": None})) == pytest.approx(
        [-0.707107] * 10 + [0.707107] * 6, abs=1e-5
    )


def test_the_buffer_of_the_overlong_penalty_is_a_fifth_of_the_limit_by_default():
    # limit 20: buffer 4; length 18 is half into it: 1 - 3 * 0.5
    inputs = credit_inputs(advantage_inputs([1], turns=[[18]]))
    assert shaped(inputs, ShapingConfig(overlong=OverlongConfig(weight=3.0)), max_new_tokens=20)[0] == pytest.approx(-0.5)
    # limit 4: a fifth is less than a token, so one token: length 4 is at the limit
    inputs = credit_inputs(advantage_inputs([1], turns=[[4]]))
    assert shaped(inputs, ShapingConfig(overlong=OverlongConfig()), max_new_tokens=4)[0] == 0.0


def test_the_kl_is_charged_after_rewards_are_clipped():
    # reward 3 clipped to 1; k1 of 2 nats with weight 0.1 at each of two tokens: returns 1 - 0.4, 1 - 0.2
    outcomes = advantage_inputs([3], turns=[[2]])
    inputs = credit_inputs(outcomes, anchor_logprobs_N=[-1, -1], reference_logprobs_N=[-3, -3])
    recipe = credit_recipe(ShapingConfig(reward_clip=1.0, kl=KL), advantage=monte_carlo_return, kl_estimators={"": k1})
    assert credited(inputs, recipe).advantages_N.tolist() == pytest.approx([0.6, 0.8])


def test_advantages_are_whitened_then_clipped_and_the_returns_of_the_critic_are_neither():
    # returns 1 | 0, 0, 0; whitened 1.5, -0.5, -0.5, -0.5 (std 0.5); clipped at 1. (Clipped first, 1.5 would stay.)
    # the critic is to predict advantage + value: (1 - 0.25) + 0.25 = 1 and (0 - 0.25) + 0.25 = 0
    outcomes = advantage_inputs([1, 0], turns=[[1], [3]], values_N=[0.25] * 4)
    gae = partial(generalized_advantage, discount=1.0, trace_decay=1.0, bootstrap_truncated=False)
    recipe = credit_recipe(advantage=gae, whiten_advantages=True, advantage_clip=1.0)
    credit = credited(credit_inputs(outcomes), recipe)
    assert credit.advantages_N.tolist() == pytest.approx([1.0, -0.5, -0.5, -0.5], abs=1e-5)
    assert credit.returns_N.tolist() == pytest.approx([1, 0, 0, 0])
    assert credit.metrics["advantage/clip_fraction"] == 0.25
    assert credit.metrics["advantage/largest"] == 1.0
    assert credit.metrics["advantage/mean"] == pytest.approx(-0.125, abs=1e-5)  # (1 - 1.5) / 4


@few
@given(random_inputs(), st.floats(0.1, 2))
def test_whitening_and_clipping_change_advantages_and_leave_returns_alone(inputs, clip):
    gae = partial(generalized_advantage, discount=0.5, trace_decay=0.8, bootstrap_truncated=True)
    plain = credited(inputs, credit_recipe(advantage=gae))
    white = credited(inputs, credit_recipe(advantage=gae, whiten_advantages=True))
    clipped = credited(inputs, credit_recipe(advantage=gae, whiten_advantages=True, advantage_clip=clip))
    assert torch.allclose(plain.returns_N, gae(inputs.outcomes) + inputs.outcomes.values_N)
    assert torch.equal(plain.returns_N, clipped.returns_N)
    assert white.advantages_N.mean().item() == pytest.approx(0, abs=1e-6)
    if plain.advantages_N.std() > 0.01:
        assert white.advantages_N.std().item() == pytest.approx(1, abs=1e-3)
    assert torch.equal(clipped.advantages_N, white.advantages_N.clamp(-clip, clip))
    share = (white.advantages_N.abs() > clip).double().mean().item()
    assert clipped.metrics["advantage/clip_fraction"] == pytest.approx(share)


@few
@given(random_batches(pays_turns=False, pays_tokens=False))
def test_returns_of_rewards_normalised_by_group_are_grpo(batch):
    recipe = credit_recipe(NormalizingConfig(normalize=NormalizeConfig()), advantage=monte_carlo_return)
    assert torch.allclose(credited(credit_inputs(batch), recipe).advantages_N, group_normalized(batch))


# Turn rewards and the greedy baseline are shaped like the reward of the trajectory.


def test_a_clipped_trajectory_is_paid_less_for_each_of_its_turns():
    # 4 in all: 2 and 1 by turns, 1 at the end. Clipped to 2, all is halved: 1, 0.5, 0.5; from each turn on 2, 1
    # (with turns paid as before, the second would be worth 2 - 2 = 0)
    inputs = credit_inputs(advantage_inputs([4], turns=[[1, 1]], turn_rewards=[[2, 1]]))
    recipe = credit_recipe(ShapingConfig(reward_clip=2.0), advantage=partial(turn_return, discount=1.0))
    assert credited(inputs, recipe).advantages_N.tolist() == pytest.approx([2.0, 1.0])


@few
@given(random_batches(pays_tokens=False))
def test_normalising_by_the_batch_moves_and_scales_all_returns_alike(batch):
    # each return is (what was earned from there on - mean) / std, in every turn
    mean, std = batch.rewards_S.mean(), batch.rewards_S.std() + 1e-6
    advantage = partial(turn_return, discount=1.0)
    credit = credited(credit_inputs(batch), credit_recipe(NormalizingConfig(normalize=BATCH), advantage=advantage))
    if batch.rewards_S.unique().numel() > 1:
        assert torch.allclose(credit.advantages_N, (advantage(batch) - mean) / std, atol=1e-6)


def test_the_greedy_baseline_is_clipped_like_the_rewards():
    # 3 and 0.5 against 3 and 2, clipped at 1: 1 - 1 and 0.5 - 1
    inputs = credit_inputs(advantage_inputs([3, 0.5], greedy_rewards_S=[3, 2]))
    credit = credited(inputs, credit_recipe(ShapingConfig(reward_clip=1.0), advantage=greedy_baseline))
    assert credit.advantages_N.tolist() == [0.0, -0.5]


# KL in the reward.


def test_the_sampled_kl_is_charged_token_by_token_with_its_estimator():
    # d = 2, -1: k1 costs 0.1 * 2 and pays 0.1 * 1; k2 = d^2 / 2 costs 0.2 and 0.05
    inputs = credit_inputs(advantage_inputs([1], turns=[[2]]), anchor_logprobs_N=[-1, -2], reference_logprobs_N=[-3, -1])
    recipe = credit_recipe(ShapingConfig(kl=KL), advantage=token_rewards_only)
    by_k1, by_k2 = (credited(inputs, replace(recipe, kl_estimators={"": estimator})) for estimator in (k1, k2))
    assert by_k1.advantages_N.tolist() == pytest.approx([-0.2, 0.1])
    assert by_k2.advantages_N.tolist() == pytest.approx([-0.2, -0.05])
    assert by_k1.metrics["reward/kl"] == pytest.approx(1.0)  # 2 - 1, of one trajectory
    assert by_k1.metrics["reward/kl_coefficient"] == 0.1


def test_the_full_kl_is_charged_as_it_was_computed_and_needs_no_logprobs():
    inputs = credit_inputs(advantage_inputs([1, 0], turns=[[2], [1]]), divergences_N=[0.5, 1.5, 4.0])
    section = ShapingConfig(kl=KlRewardConfig(coefficient=0.1, estimator=KlEstimator.FULL))
    credit = credited(inputs, credit_recipe(section, advantage=token_rewards_only))
    assert credit.advantages_N.tolist() == pytest.approx([-0.05, -0.15, -0.4])
    assert credit.metrics["reward/kl"] == pytest.approx(3.0)  # (2 + 4) / 2 trajectories


@few
@given(random_inputs())
def test_a_sampled_kl_is_charged_like_a_full_one_of_the_same_size(inputs):
    recipe = credit_recipe(ShapingConfig(kl=KL), advantage=group_relative)
    sampled = credited(inputs, replace(recipe, kl_estimators={"": k2}))
    divergences_N = k2(inputs.anchor_logprobs_N, inputs.reference_logprobs_N)
    full = credited(replace(inputs, divergences_N=divergences_N), recipe)
    assert torch.equal(sampled.advantages_N, full.advantages_N)
    assert sampled.metrics == full.metrics


# Masks and weights.


def test_masked_trajectories_count_in_baselines_but_are_not_kept():
    # the second was cut off; the mean is 0.5 all the same
    inputs = credit_inputs(advantage_inputs([1, 0], truncated=[False, True]))
    credit = credited(inputs, credit_recipe(ShapingConfig(masks=MasksConfig(truncated=True))))
    assert credit.advantages_N.tolist() == [0.5, -0.5]
    assert credit.kept_S.tolist() == [True, False]
    assert credit.metrics["sample/masked"] == 0.5


@pytest.mark.parametrize(
    ("masks", "kept"),
    [
        (MasksConfig(min_accuracy=0.0), [True, True, True, True, False, False]),  # accuracies 1, 0.5, 0
        (MasksConfig(max_accuracy=1.0), [False, False, True, True, True, True]),
        (MasksConfig(min_accuracy=0.0, max_accuracy=1.0), [False, False, True, True, False, False]),
        (MasksConfig(wrong_above_tokens=2), [True, True, True, False, True, False]),  # wrong, with 3 and 4 tokens
        (MasksConfig(truncated=True), [False, True, True, True, True, True]),
        (MasksConfig(truncated=True, max_accuracy=1.0, wrong_above_tokens=2), [False, False, True, False, True, False]),
    ],
)
def test_masks_by_hand(masks, kept):
    outcomes = advantage_inputs(
        [0] * 6, [0, 0, 1, 1, 2, 2], turns=[[9], [1], [9], [1, 2], [2], [4]], truncated=[True, *[False] * 5]
    )
    inputs = credit_inputs(outcomes, correct=[1, 1, 1, 0, 0, 0])
    credit = credited(inputs, credit_recipe(ShapingConfig(masks=masks)))
    assert credit.kept_S.tolist() == kept
    assert credit.metrics["sample/masked"] == pytest.approx(kept.count(False) / 6)


def test_weights_multiply_and_have_mean_one_over_those_kept():
    # accuracies 1 | 0: difficulty 0.5 | 2; lengths 1, 3 | 3, 2: 1.5, 0.5 | 0.5, 1; products 0.75, 0.25 | 1, 2
    # the last was cut off: over the mean 2/3 of the others, 1.125, 0.375, 1.5; the masked one is given 1
    outcomes = advantage_inputs([1, 1, 0, 0], [0, 0, 1, 1], turns=[[1], [3], [3], [2]], truncated=[False] * 3 + [True])
    weights = SampleWeightsConfig(difficulty=WeightRange(first=0.5, last=2.0), length=WeightRange(first=1.5, last=0.5))
    section = ShapingConfig(weights=weights, masks=MasksConfig(truncated=True))
    credit = credited(credit_inputs(outcomes, correct=[1, 1, 0, 0]), credit_recipe(section))
    assert credit.weights_S.tolist() == pytest.approx([1.125, 0.375, 1.5, 1.0])


def test_weights_of_a_batch_whose_trajectories_all_have_weight_zero_are_zero_and_not_nan():
    # groups that are always right have weight 0, and there are no others
    section = ShapingConfig(weights=SampleWeightsConfig(difficulty=WeightRange(first=0.0, last=1.0)))
    credit = credited(credit_inputs(advantage_inputs([1, 1])), credit_recipe(section))
    assert credit.weights_S.tolist() == [0, 0]


@few
@given(random_inputs())
def test_masks_and_weights_leave_advantages_alone_and_weights_have_mean_one(inputs):
    section = ShapingConfig(masks=EVERYTHING.masks, weights=EVERYTHING.weights)
    credit = credited(inputs, credit_recipe(section))
    assert torch.equal(credit.advantages_N, group_relative(inputs.outcomes))
    if bool(credit.kept_S.any()):
        assert credit.weights_S[credit.kept_S].mean().item() == pytest.approx(1)


# Domains.


def test_a_domains_own_section_replaces_the_common_one_for_its_trajectories_alone():
    # "sort" clips at 0.5 and charges full KL with weight 0.5; the others clip at 2 and charge k1 with 0.1
    common = ShapingConfig(reward_clip=2.0, kl=KL, masks=MasksConfig(truncated=True))
    own = ShapingConfig(reward_clip=0.5, kl=KlRewardConfig(coefficient=0.5, estimator=KlEstimator.FULL))
    inputs = credit_inputs(
        advantage_inputs([3, 3, 1], truncated=[True, True, False]),
        domain=[0, 1, 2],
        domains=("math", "sort", "chat"),
        anchor_logprobs_N=[-1, -1, -1],
        reference_logprobs_N=[-2, -2, -4],
        divergences_N=[8, 8, 8],
    )
    recipe = credit_recipe(common, domains={"sort": own}, kl_estimators={"": k1}, advantage=monte_carlo_return)
    credit = credited(inputs, recipe)
    assert credit.advantages_N.tolist() == pytest.approx([2 - 0.1 * 1, 0.5 - 0.5 * 8, 1 - 0.1 * 3])
    assert credit.kept_S.tolist() == [False, True, True]
    assert credit.metrics == pytest.approx(
        {
            "reward/clip_fraction": 0.5,  # 3 of (3, 1)
            "reward/clip_fraction/sort": 1.0,
            "reward/kl": 2.0,  # (1 + 3) / 2
            "reward/kl/sort": 8.0,
            "reward/kl_coefficient": 0.1,
            "reward/kl_coefficient/sort": 0.5,
            "advantage/mean": (1.9 - 3.5 + 0.7) / 3,
            "advantage/largest": 3.5,
            "sample/masked": 1 / 3,
        }
    )


def test_a_domain_without_penalty_is_charged_nothing_beside_a_domain_with_one():
    inputs = credit_inputs(advantage_inputs([0, 0]), domain=[0, 1], domains=("math", "sort"), divergences_N=[3, 3])
    own = ShapingConfig(kl=KlRewardConfig(coefficient=1.0, estimator=KlEstimator.FULL))
    credit = credited(inputs, credit_recipe(domains={"sort": own}, advantage=monte_carlo_return))
    assert credit.advantages_N.tolist() == [0.0, -3.0]


def test_a_section_for_a_domain_that_is_not_in_the_batch_does_nothing():
    inputs = credit_inputs(advantage_inputs([1, 0]))
    credit = credited(inputs, credit_recipe(domains={"chat": EVERYTHING}))
    assert credit.advantages_N.tolist() == [0.5, -0.5]
    assert set(credit.metrics) == {"advantage/mean", "advantage/largest", "sample/masked"}


def test_statistics_by_domain_are_kept_apart():
    # "math": 1, 3: +-1 / sqrt(2); "sort": 10, 10: exactly 0
    inputs = credit_inputs(advantage_inputs([1, 10, 3, 10]), domain=[0, 1, 0, 1], domains=("math", "sort"))
    by_domain = NormalizeConfig(mean=StatisticsFrom.DOMAIN, std=StatisticsFrom.DOMAIN)
    rewards = shaped(inputs, NormalizingConfig(normalize=by_domain))
    assert rewards == pytest.approx([-0.707107, 0, 0.707107, 0], abs=1e-5)


@few
@given(random_inputs())
def test_a_section_equal_to_the_common_one_gives_the_same_credit(inputs):
    inputs = replace(inputs, domain_S=torch.zeros_like(inputs.domain_S), domains=("sort",))
    recipe = credit_recipe(EVERYTHING, kl_estimators={"": k1, "sort": k1}, advantage=monte_carlo_return)
    common, own = credited(inputs, recipe), credited(inputs, replace(recipe, domains={"sort": EVERYTHING}))
    assert torch.equal(common.advantages_N, own.advantages_N)
    assert torch.equal(common.kept_S, own.kept_S)
    assert torch.equal(common.weights_S, own.weights_S)


# State.


def test_running_statistics_are_of_all_rewards_of_the_domain_so_far_with_this_batch():
    # "sort" saw 0, 2 before and now sees 4: mean 2, std sqrt((4 + 0 + 4) / 2) = 2, (4 - 2) / 2 = 1
    # "math" sees 1, 3 for the first time: mean 2, std sqrt(2), +-0.707107
    before = CreditState(moments={"sort": Moments(count=2, mean=1, squares=2)})
    inputs = credit_inputs(advantage_inputs([1, 4, 3]), domain=[0, 1, 0], domains=("math", "sort"))
    recipe = credit_recipe(NormalizingConfig(normalize=RUNNING), advantage=outcome_only)
    credit, after = assign_credit(inputs, recipe, before)
    assert credit.advantages_N.tolist() == pytest.approx([-0.707107, 1.0, 0.707107], abs=1e-5)
    assert after.moments == {
        "math": Moments(count=2, mean=2, squares=2),
        "sort": Moments(count=3, mean=2, squares=8),
    }


def test_running_statistics_are_of_rewards_with_their_overlong_penalties():
    # 1 - 1 (ten tokens of ten) and 1: mean 0.5, std 0.707107. (The moments of 1, 1 would give -1 / 1e-6.)
    inputs = credit_inputs(advantage_inputs([1, 1], turns=[[10], [1]]))
    section = NormalizingConfig(normalize=RUNNING, overlong=OverlongConfig())
    credit, state = assign_credit(inputs, credit_recipe(section, advantage=outcome_only), CreditState())
    assert state.moments == {"sort": Moments(count=2, mean=0.5, squares=0.5)}
    assert credit.advantages_N.tolist() == pytest.approx([-0.707107] * 10 + [0.707107], abs=1e-5)


def test_moments_are_kept_only_for_running_statistics():
    inputs = credit_inputs(advantage_inputs([1, 0]))
    _, state = assign_credit(inputs, credit_recipe(NormalizingConfig(normalize=BATCH)), CreditState())
    assert state.moments == {}


def test_an_adaptive_coefficient_is_charged_as_it_stands_and_moved_for_the_next_iteration():
    # KL of 3 a trajectory, target 1: the error is cut at 0.2; two trajectories of a horizon of 10: 0.1 * (1 + 0.2 * 0.2)
    section = ShapingConfig(kl=KlRewardConfig(coefficient=0.1, adaptive=AdaptiveKlConfig(target=1.0, horizon=10.0)))
    inputs = credit_inputs(advantage_inputs([0, 0]), anchor_logprobs_N=[0, 0], reference_logprobs_N=[-2, -4])
    recipe = credit_recipe(section, kl_estimators={"": k1}, advantage=token_rewards_only)
    first, after_first = assign_credit(inputs, recipe, CreditState())
    assert first.advantages_N.tolist() == pytest.approx([-0.2, -0.4])
    assert after_first.kl_coefficients == pytest.approx({"": 0.104})
    second, after_second = assign_credit(inputs, recipe, after_first)
    assert second.advantages_N.tolist() == pytest.approx([-0.208, -0.416])
    assert second.metrics["reward/kl_coefficient"] == pytest.approx(0.104)
    assert after_second.kl_coefficients == pytest.approx({"": 0.104 * 1.04})


def test_each_domains_coefficient_follows_its_own_kl():
    # "math" (no section of its own) is on target 2, "sort" above its target 1: 0.1 * (1 + 0.2 * 1 / 10)
    def section(target: float) -> ShapingConfig:
        adaptive = AdaptiveKlConfig(target=target, horizon=10.0)
        return ShapingConfig(kl=KlRewardConfig(coefficient=0.1, estimator=KlEstimator.FULL, adaptive=adaptive))

    inputs = credit_inputs(advantage_inputs([0, 0]), domain=[0, 1], domains=("math", "sort"), divergences_N=[2, 2])
    before = CreditState(kl_coefficients={"chat": 0.7})
    _, after = assign_credit(inputs, credit_recipe(section(2.0), domains={"sort": section(1.0)}), before)
    assert after.kl_coefficients == pytest.approx({"chat": 0.7, "": 0.1, "sort": 0.102})


def test_a_coefficient_that_does_not_adapt_is_not_kept():
    inputs = credit_inputs(advantage_inputs([0]), anchor_logprobs_N=[0], reference_logprobs_N=[-2])
    _, state = assign_credit(inputs, credit_recipe(ShapingConfig(kl=KL), kl_estimators={"": k1}), CreditState())
    assert state.kl_coefficients == {}


def credit_with_everything(state: CreditState, inputs: CreditInputs) -> tuple[Tensor, CreditState]:
    """Advantages and next state, with every kind of shaping switched on."""
    recipe = credit_recipe(EVERYTHING, kl_estimators={"": k1}, advantage=monte_carlo_return)
    credit, state = assign_credit(inputs, recipe, state)
    return credit.advantages_N, state


@few
@given(random_inputs(), random_inputs())
def test_credit_is_pure_and_its_state_survives_json(first, second):
    _, between = credit_with_everything(CreditState(), first)
    as_it_was = between.model_dump_json()
    advantages_N, after = credit_with_everything(between, second)
    assert between.model_dump_json() == as_it_was
    again_N, after_again = credit_with_everything(CreditState.model_validate_json(as_it_was), second)
    assert torch.equal(advantages_N, again_N)
    assert after_again == after
    assert after != between  # the state did change


@few
@given(random_inputs(), st.lists(quarters, min_size=1, max_size=4))
def test_moments_of_two_iterations_are_those_of_all_their_rewards(first, rewards):
    recipe = credit_recipe(NormalizingConfig(normalize=RUNNING), advantage=outcome_only)
    second = credit_inputs(advantage_inputs(rewards), domains=("math",))
    _, state = assign_credit(first, recipe, CreditState())
    _, state = assign_credit(second, recipe, state)
    seen_X = torch.cat([first.outcomes.rewards_S[first.domain_S == 0], floats(rewards)])
    assert state.moments["math"].count == len(seen_X)
    assert state.moments["math"].mean == pytest.approx(seen_X.mean().item())
    assert state.moments["math"].squares == pytest.approx(((seen_X - seen_X.mean()) ** 2).sum().item(), abs=1e-9)


def test_a_domain_is_not_charged_for_the_lengths_of_another():
    """Only "sort" charges for length; its own completions are short, so its rewards stay, and so does the batch's mean."""
    # rewards 1, 0 of sort (1 token), 0, 0 of math (10 tokens, the limit): the mean of the batch is 1/4
    inputs = credit_inputs(
        advantage_inputs([1, 0, 0, 0], turns=[[1], [1], [10], [10]]), domain=[0, 0, 1, 1], domains=("sort", "math")
    )
    by_batch = NormalizeConfig(mean=StatisticsFrom.BATCH, std=StatisticsFrom.NONE)
    section = NormalizingConfig(overlong=OverlongConfig(buffer_tokens=5), normalize=by_batch)
    recipe = credit_recipe(NormalizingConfig(), domains={"sort": section}, advantage=outcome_only, max_new_tokens=10)
    credit = credited(inputs, recipe)
    assert [credit.advantages_N[0].item(), credit.advantages_N[1].item()] == pytest.approx([0.75, -0.25])


def test_length_weights_of_a_domain_are_of_its_own_lengths():
    inputs = credit_inputs(advantage_inputs([1, 1, 1], turns=[[4], [4], [9]]), domain=[0, 0, 1], domains=("sort", "math"))
    section = ShapingConfig(weights=SampleWeightsConfig(length=WeightRange(first=2.0, last=1.0)))
    credit = credited(inputs, credit_recipe(ShapingConfig(), domains={"sort": section}, advantage=outcome_only))
    # both of sort are equally long: weight 2 each, beside 1 of math; rescaled by 3/5
    assert credit.weights_S.tolist() == pytest.approx([1.2, 1.2, 0.6])


def test_a_greedy_baseline_pays_for_its_own_length():
    # both completions have 8 of 8 tokens: both lose 1, and none is better than the other
    inputs = credit_inputs(advantage_inputs([1], turns=[[8]], greedy_rewards_S=[1]))
    inputs = replace(inputs, greedy_lengths_S=torch.tensor([8.0]))
    recipe = credit_recipe(ShapingConfig(overlong=OverlongConfig()), advantage=greedy_baseline, max_new_tokens=8)
    assert credited(inputs, recipe).advantages_N.tolist() == [0.0] * 8


def test_the_charge_of_a_token_can_be_bounded():
    inputs = credit_inputs(advantage_inputs([0], turns=[[2]]))
    inputs = replace(inputs, anchor_logprobs_N=floats([-1, -1]), reference_logprobs_N=floats([-1.1, -9]))
    shaping = ShapingConfig(kl=KlRewardConfig(coefficient=1.0, token_reward_clip=0.5))
    credit = credited(inputs, credit_recipe(shaping, kl_estimators={"": k1}, advantage=monte_carlo_return))
    # charges 0.1 and 8, the second bounded to 0.5: returns -0.6 and -0.5
    assert credit.advantages_N.tolist() == pytest.approx([-0.6, -0.5])
