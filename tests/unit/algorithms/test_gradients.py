"""Gradients against finite differences, in float64, at points away from the kinks of clips and maxima. Shapes: N tokens, V
vocabulary, P pairs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from roll_core.algorithms import divergences, losses
from roll_core.algorithms.inputs import LossInputs
from roll_core.algorithms.preferences import direct_preference, identity_preference
from roll_core.algorithms.values import clipped_value_loss
from roll_core.config.algorithm.correction import CorrectionLevel
from tests.unit.algorithms.builders_losses import (
    CORRECTIONS,
    OBJECTIVES,
    PPO,
    REDUCTIONS,
    STRAIGHT_THROUGH,
    WITH_STOPPED_WEIGHTS,
    correction,
    random_loss_inputs,
    random_preference_inputs,
    random_value_inputs,
)

SEED = 24
every_reduction = pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)


def at_policy(inputs: LossInputs, compute: Callable[[LossInputs], Tensor]) -> Callable[[Tensor], Tensor]:
    """Loss as a function of the policy's logprobs alone."""
    return lambda policy_N: compute(replace(inputs, policy_logprobs_N=policy_N))


def with_frozen_weights(inputs: LossInputs, compute: Callable[[LossInputs], Tensor]) -> Callable[[Tensor], Tensor]:
    """Loss as a function of the policy's logprobs, with anchor and sampler moving along with the policy. Their ratios, and
    the weights computed from them, stay as they are at the point. A loss with sg[weight] has the gradient of this
    surrogate."""
    point_N = inputs.policy_logprobs_N.detach().clone()  # finite differences are taken in place

    def loss(policy_N: Tensor) -> Tensor:
        move_N = policy_N.detach() - point_N
        return compute(
            replace(
                inputs,
                policy_logprobs_N=policy_N,
                anchor_logprobs_N=inputs.anchor_logprobs_N + move_N,
                sampler_logprobs_N=inputs.sampler_logprobs_N + move_N,
            )
        )

    return loss


def compute_loss(inputs: LossInputs, **choices) -> Tensor:
    return losses.policy_loss(inputs, **choices).loss


def point() -> LossInputs:
    """Loss inputs at which gradients are checked, away from the kinks."""
    return random_loss_inputs(SEED, masked_share=0.15)


def test_at_the_point_some_tokens_are_clipped_some_are_not_and_some_are_masked():
    inputs = point()
    assert 0 < inputs.mask_N.sum() < len(inputs.mask_N)
    for name in ("ppo", "dual_clip", "gspo", "gspo_of_turns", *WITH_STOPPED_WEIGHTS):
        is_clipped_N = OBJECTIVES[name](inputs).clipped_N[inputs.mask_N.bool()]
        assert {True, False} == set(is_clipped_N.tolist()), name
    assert (OBJECTIVES["dual_clip"](inputs).clipped_N & ~PPO(inputs).clipped_N & inputs.mask_N.bool()).any()


@every_reduction
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in (*WITH_STOPPED_WEIGHTS, *STRAIGHT_THROUGH)])
def test_the_gradient_of_an_objective_is_that_of_its_loss(name, reduce):
    inputs = point()
    compute = partial(compute_loss, objective=OBJECTIVES[name], reduce=reduce)
    assert gradcheck(at_policy(inputs, compute), (inputs.policy_logprobs_N,))


@every_reduction
@pytest.mark.parametrize("name", WITH_STOPPED_WEIGHTS)
def test_the_gradient_of_an_objective_with_stopped_weights_is_that_of_the_surrogate_with_frozen_weights(name, reduce):
    inputs = point()
    compute = partial(compute_loss, objective=OBJECTIVES[name], reduce=reduce)
    assert gradcheck(with_frozen_weights(inputs, compute), (inputs.policy_logprobs_N,))
    assert not gradcheck(at_policy(inputs, compute), (inputs.policy_logprobs_N,), raise_exception=False)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "uncorrected"])
def test_corrections_are_constants_to_the_gradient(name):
    inputs = point()
    compute = partial(
        compute_loss, objective=PPO, reduce=REDUCTIONS["sequence_mean_token_mean"], correction=CORRECTIONS[name]
    )
    assert gradcheck(at_policy(inputs, compute), (inputs.policy_logprobs_N,))


def test_the_behaviour_weight_of_decoupled_ppo_has_no_gradient_where_the_anchor_is_the_policy_itself():
    inputs = point()
    inputs = replace(inputs, anchor_logprobs_N=inputs.policy_logprobs_N.detach().clone())
    weigh = correction(level=CorrectionLevel.TOKEN, upper=None)
    compute = partial(compute_loss, objective=losses.policy_gradient, reduce=REDUCTIONS["token_mean"], correction=weigh)
    following = replace(inputs, anchor_logprobs_N=inputs.policy_logprobs_N)
    expected_N, found_N = (torch.autograd.grad(compute(each), inputs.policy_logprobs_N)[0] for each in (inputs, following))
    assert gradcheck(at_policy(inputs, compute), (inputs.policy_logprobs_N,))
    assert torch.equal(found_N, expected_N)


@every_reduction
@pytest.mark.parametrize("estimator", [divergences.k1, divergences.k2, divergences.k3, divergences.absolute])
def test_the_gradient_of_the_kl_term_is_that_of_its_estimate(estimator, reduce):
    inputs = point()
    compute = partial(
        compute_loss, objective=losses.policy_gradient, reduce=reduce, kl_coefficient=0.7, kl_estimator=estimator
    )
    assert gradcheck(at_policy(inputs, compute), (inputs.policy_logprobs_N,))


@every_reduction
def test_the_gradient_of_the_whole_loss_from_the_logits_on(reduce):
    """Objective, entropy bonus and full-vocabulary KL together, through the softmax that all three come from."""
    inputs = point()
    generator = torch.Generator().manual_seed(SEED)
    logits_NV, reference_NV = torch.randn(2, len(inputs.mask_N), 4, generator=generator, dtype=torch.float64)
    reference_NV = reference_NV.log_softmax(-1)
    anchor_N = logits_NV.log_softmax(-1)[:, 0] + inputs.anchor_logprobs_N - inputs.policy_logprobs_N.detach()

    def loss(logits_NV: Tensor) -> Tensor:
        logprobs_NV = logits_NV.log_softmax(-1)
        seen = replace(
            inputs,
            policy_logprobs_N=logprobs_NV[:, 0],
            anchor_logprobs_N=anchor_N,
            entropies_N=-(logprobs_NV.exp() * logprobs_NV).sum(-1),
            divergences_N=divergences.full(logprobs_NV, reference_NV),
        )
        return compute_loss(seen, objective=PPO, reduce=reduce, kl_coefficient=0.3, entropy_coefficient=0.2)

    assert gradcheck(loss, (logits_NV.clone().requires_grad_(),))


def test_the_gradient_of_the_full_divergence():
    generator = torch.Generator().manual_seed(SEED)
    logits_NV, other_NV = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    assert gradcheck(
        lambda logits: divergences.full(logits.log_softmax(-1), other_NV.log_softmax(-1)),
        (logits_NV.clone().requires_grad_(),),
    )


def test_the_gradient_of_the_cross_entropy():
    inputs = point()
    compute = at_policy(inputs, lambda each: losses.cross_entropy(each).loss)
    assert gradcheck(compute, (inputs.policy_logprobs_N,))


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_the_gradient_of_the_value_loss(value_clip):
    inputs = random_value_inputs(SEED, masked_share=0.2)

    def loss(values_N: Tensor) -> Tensor:
        return clipped_value_loss(replace(inputs, values_N=values_N), value_clip=value_clip).loss

    clipped = clipped_value_loss(inputs, value_clip=value_clip).metric_sums["critic/clip_fraction"]
    assert (clipped > 0) == (value_clip is not None)
    assert gradcheck(loss, (inputs.values_N,))


@pytest.mark.parametrize(
    "loss",
    [
        partial(direct_preference, beta=0.3),
        partial(direct_preference, beta=0.3, label_smoothing=0.2),
        partial(identity_preference, beta=0.3),
    ],
    ids=["direct", "smoothed", "identity"],
)
def test_the_gradient_of_preference_losses(loss):
    inputs = random_preference_inputs(SEED)
    assert gradcheck(
        lambda chosen_P, rejected_P: loss(replace(inputs, chosen_logprobs_P=chosen_P, rejected_logprobs_P=rejected_P)),
        (inputs.chosen_logprobs_P, inputs.rejected_logprobs_P),
    )
