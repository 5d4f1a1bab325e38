"""Defect of the original ROLL that must not come back: its token mean ignored the mask, so that removed tokens were trained
on. Here the mask counts in every aggregation, and a NaN or infinite value of a removed token does not spread."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roll_core.algorithms import divergences, losses
from roll_core.algorithms.corrections import WEIGHT
from roll_core.algorithms.inputs import LossInputs
from roll_core.algorithms.values import clipped_value_loss
from roll_core.config.algorithm.correction import CorrectionLevel, FilterConfig
from tests.unit.algorithms.builders_losses import (
    OBJECTIVES,
    REDUCTIONS,
    correction,
    gradient,
    loss_inputs,
    policy_gradient_of,
    random_loss_inputs,
    value_inputs,
)

every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
every_reduction = pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
ESTIMATORS = (divergences.k1, divergences.k2, divergences.k3, divergences.absolute)


@pytest.mark.parametrize(
    ("name", "masked", "unmasked"),
    [
        # -log pi of sequences (1, 2, 4) and (8), the 4 masked
        ("token_mean", 11 / 4, 15 / 4),
        ("sequence_mean_token_sum", (3 + 8) / 2, (7 + 8) / 2),
        ("sequence_mean_token_mean", (3 / 3 + 8) / 2, (7 / 3 + 8) / 2),
        ("fixed_length", (3 / 7 + 8 / 7) / 2, (7 / 7 + 8 / 7) / 2),
    ],
)
def test_the_mask_counts_in_every_aggregation(name, masked, unmasked):
    inputs = loss_inputs(policy=[-1.0, -2.0, -4.0, -8.0], layout=((3,), (1,)), mask=[1.0, 1.0, 0.0, 1.0])
    loss = losses.policy_loss(inputs, objective=losses.policy_gradient, reduce=REDUCTIONS[name]).loss
    assert loss.item() == pytest.approx(masked)
    assert loss.item() != pytest.approx(unmasked)
    assert policy_gradient_of(loss, inputs)[2] == 0.0


def test_the_token_mean_is_not_that_of_the_original():
    """The formula of the original is mean(loss); the documented one is sum(mask * loss) / tokens."""
    inputs = loss_inputs(policy=[-1.0, -2.0, -4.0, -8.0], mask=[1.0, 1.0, 0.0, 1.0])
    original = losses.policy_gradient(inputs).loss_N.mean()
    documented = losses.policy_loss(inputs, objective=losses.policy_gradient, reduce=REDUCTIONS["token_mean"]).loss
    assert (original.item(), documented.item()) == (3.75, 2.75)
    assert policy_gradient_of(original, inputs)[2] == -0.25
    assert policy_gradient_of(documented, inputs)[2] == 0.0


@every_reduction
@every_objective
def test_tokens_that_a_filter_removes_have_no_gradient_in_any_aggregation(objective, reduce):
    inputs = random_loss_inputs(4)
    corrected, _ = (filtering := correction(FilterConfig(lower=0.8, upper=1.2)))(inputs)
    is_removed_N = corrected.mask_N == 0
    assert 0 < is_removed_N.sum() < len(is_removed_N)
    plain, filtered = (
        losses.policy_loss(inputs, objective=objective, reduce=reduce, correction=each).loss for each in (None, filtering)
    )
    assert (gradient(filtered, inputs.policy_logprobs_N)[is_removed_N] == 0).all()
    assert not torch.isclose(filtered, plain)


def holding(inputs: LossInputs, value: float, name: str) -> LossInputs:
    """Loss inputs whose third token is masked and has `value` in the field `name`."""
    held_N = vars(inputs)[name].detach().clone()
    held_N[2] = value
    mask_N = torch.ones_like(inputs.mask_N)
    mask_N[2] = 0.0
    return replace(inputs, mask_N=mask_N, **{name: held_N.requires_grad_(name == "policy_logprobs_N")})


HELD = (
    "policy_logprobs_N",
    "anchor_logprobs_N",
    "sampler_logprobs_N",
    "reference_logprobs_N",
    "entropies_N",
    "advantages_N",
)


@every_reduction
@every_objective
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nan_or_infinity_of_a_masked_token_does_not_spread(objective, reduce, value):
    inputs = random_loss_inputs(4)
    expected = loss_and_gradient(holding(inputs, 0.0, "policy_logprobs_N"), objective, reduce)
    for name in HELD:
        found = loss_and_gradient(holding(inputs, value, name), objective, reduce)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), name


def loss_and_gradient(inputs: LossInputs, objective, reduce) -> tuple[Tensor, Tensor]:
    loss = losses.policy_loss(inputs, objective=objective, reduce=reduce, kl_coefficient=0.1, entropy_coefficient=0.1).loss
    return loss.detach(), gradient(loss, inputs.policy_logprobs_N)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_reference_logprob_of_a_masked_token_does_not_spread(estimator, value):
    inputs = holding(random_loss_inputs(4), value, "reference_logprobs_N")
    outputs = losses.policy_loss(
        inputs, objective=OBJECTIVES["ppo"], reduce=REDUCTIONS["token_mean"], kl_coefficient=0.1, kl_estimator=estimator
    )
    assert gradient(outputs.loss, inputs.policy_logprobs_N).isfinite().all()
    assert outputs.metric_sums["update/kl_to_reference"].isfinite()


@pytest.mark.parametrize("level", list(CorrectionLevel))
@every_objective
def test_a_token_without_a_sampler_logprob_is_filtered_and_does_not_spread(objective, level):
    """Inference engines return NaN for tokens that they cannot score. A filter of the same level removes the token, or all
    tokens that share its ratio, and weights of that level ignore it."""
    inputs = random_loss_inputs(4)
    sampler_N = inputs.sampler_logprobs_N.clone()
    sampler_N[2] = math.nan
    wide = FilterConfig(level=level, lower=0.0, upper=1e9)
    outputs = losses.policy_loss(
        replace(inputs, sampler_logprobs_N=sampler_N),
        objective=objective,
        reduce=REDUCTIONS["token_mean"],
        correction=correction(wide, level=level, upper=2.0),
    )
    gradient_N = gradient(outputs.loss, inputs.policy_logprobs_N)
    assert gradient_N[2] == 0.0
    assert gradient_N.isfinite().all()
    assert gradient_N.any()
    assert all(value.isfinite() for value in outputs.metric_sums.values())
    assert outputs.metric_sums[WEIGHT] > 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_or_infinity_of_a_masked_token_does_not_spread_in_the_critic(value):
    # one token of error 1: 1 / 2 / 2
    for values, old, returns in ([value, 0.0, 0.0], [0.0, value, 0.0], [0.0, 0.0, value]):
        inputs = value_inputs(values=[1.0, values], old_values=[1.0, old], returns=[2.0, returns], mask=[1.0, 0.0])
        outputs = clipped_value_loss(inputs, value_clip=0.2)
        assert outputs.loss.item() == 0.25
        assert gradient(outputs.loss, inputs.values_N).tolist() == [-0.5, 0.0]
        assert all(each.isfinite() for each in outputs.metric_sums.values())


def test_an_infinity_of_a_masked_token_does_not_spread_in_the_cross_entropy():
    inputs = loss_inputs(policy=[-1.0, -math.inf], mask=[1.0, 0.0])
    loss = losses.cross_entropy(inputs).loss
    assert loss.item() == 0.5
    assert policy_gradient_of(loss, inputs) == [-0.5, 0.0]
