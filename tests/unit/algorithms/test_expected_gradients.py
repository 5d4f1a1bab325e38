"""Expected gradients by exact enumeration: a policy of two tokens and three words, every completion weighted by its chance.
Nothing is sampled, so that a bias shows to the last digit. Shapes: S completions, N their tokens, W words, P words before
them."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from roll_core.algorithms.catalog import build_algorithm
from roll_core.algorithms.credit import CreditState, assign_credit
from roll_core.config.algorithm.methods import AlgorithmConfig, Grpo, Gspo, Reinforce
from roll_core.config.algorithm.policy_update import Aggregation, RatioLevel
from roll_core.config.algorithm.shaping import KlRewardConfig, NormalizingConfig, ShapingConfig
from tests.unit.algorithms.builders_advantages import advantage_inputs, credit_inputs
from tests.unit.algorithms.builders_losses import gradient, loss_inputs

WORDS = range(3)
COMPLETIONS = list(product(WORDS, WORDS))
COEFFICIENT = 0.5
KL = KlRewardConfig(coefficient=COEFFICIENT)
PER_TOKEN = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN


def logits_of(seed: int) -> Tensor:
    """Logits of the first word, and in three rows those of the second word after each first one."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_logprobs(logits_PW: Tensor) -> Tensor:
    """Logprobs of both tokens of every completion, end to end."""
    logprobs_PW = logits_PW.log_softmax(-1)
    return torch.stack(
        [logprobs_PW[row, word] for first, second in COMPLETIONS for row, word in ((0, first), (1 + first, second))]
    )


def kl_between(logits_PW: Tensor, reference_PW: Tensor) -> Tensor:
    """KL of whole completions."""
    policy_S, reference_S = (token_logprobs(each).view(-1, 2).sum(1) for each in (logits_PW, reference_PW))
    return (policy_S.exp() * (policy_S - reference_S)).sum()


def expected_gradient(config: AlgorithmConfig, logits_PW: Tensor, reference_PW: Tensor) -> Tensor:
    """Gradient of the loss for completions of equal reward, over all completions, by the logits."""
    algorithm = build_algorithm(config, num_optimizer_steps=1, max_new_tokens=2)
    logprobs_N, reference_N = token_logprobs(logits_PW), token_logprobs(reference_PW)
    sampled_N = logprobs_N.detach()
    chances_S = sampled_N.view(-1, 2).sum(1).exp()
    outcomes = advantage_inputs([0.0] * len(COMPLETIONS), turns=[[2]] * len(COMPLETIONS))
    inputs = replace(credit_inputs(outcomes), anchor_logprobs_N=sampled_N, reference_logprobs_N=reference_N)
    credit, _ = assign_credit(inputs, algorithm.credit, CreditState())
    batch = replace(
        loss_inputs(policy=sampled_N.tolist(), layout=[[2]] * len(COMPLETIONS), global_sequences=1.0),
        policy_logprobs_N=logprobs_N,
        advantages_N=credit.advantages_N,
        weights_N=chances_S.repeat_interleave(2),
    )
    return gradient(algorithm.loss(batch).loss, logits_PW)


@pytest.mark.parametrize(
    "config",
    [
        Gspo(shaping=ShapingConfig(kl=KL)),
        Gspo(level=RatioLevel.TURN, domains={"sort": ShapingConfig(kl=KL)}),
        Grpo(shaping=ShapingConfig(kl=KL), aggregation=PER_TOKEN),
        Reinforce(shaping=NormalizingConfig(kl=KL), aggregation=PER_TOKEN),
    ],
    ids=["gspo", "gspo of turns, in a domain", "grpo", "reinforce"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_kl_in_the_reward_has_the_gradient_of_the_kl(config, seed):
    logits_PW, reference_PW = logits_of(seed).requires_grad_(), logits_of(seed + 100)
    of_kl_PW = gradient(kl_between(logits_PW, reference_PW), logits_PW)
    found_PW = expected_gradient(config, logits_PW, reference_PW)
    assert torch.allclose(found_PW, COEFFICIENT / 2 * of_kl_PW, atol=1e-14)  # half: the mean over two tokens
