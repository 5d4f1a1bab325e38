"""Fused output layer: its values and gradients against those of the plain formulas."""

import pytest
import torch
from torch import Tensor

from roll_core.algorithms.divergences import full
from roll_core.training.scorer import WHOLE, ScoreTokens

HIDDEN, VOCABULARY, TOKENS = 5, 7, 6
TARGETS = torch.tensor([0, 3, 6, 2, 2, 5])


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and output layer of a policy, then those of a reference of another width."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (TOKENS, 3), (VOCABULARY, 3)]
    return tuple(torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)


def fused(hidden: Tensor, output: Tensor, reference: Tensor, reference_output: Tensor, chunk: int, temperature: float):
    return ScoreTokens.apply(hidden, output, TARGETS, reference, reference_output, temperature, chunk, WHOLE)


def plain(hidden: Tensor, output: Tensor, reference: Tensor, reference_output: Tensor, temperature: float):
    policy = (hidden @ output.T / temperature).log_softmax(-1)
    other = (reference @ reference_output.T / temperature).log_softmax(-1)
    return policy.gather(1, TARGETS[:, None]).squeeze(1), -(policy.exp() * policy).sum(-1), full(policy, other)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_scores_and_their_gradients_are_those_of_the_plain_formulas(chunk, temperature):
    hidden, output, reference, reference_output = tensors()
    hidden.requires_grad_()
    output.requires_grad_()
    weights = torch.randn(3, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for scores in (
        fused(hidden, output, reference, reference_output, chunk, temperature),
        plain(hidden, output, reference, reference_output, temperature),
    ):
        loss = sum((weight * score).sum() for weight, score in zip(weights, scores, strict=True))
        found.append((*(score.detach() for score in scores), *torch.autograd.grad(loss, (hidden, output))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2)], ids=str)
def test_gradients_of_any_of_the_scores_agree_with_finite_differences(used):
    hidden, output, reference, reference_output = tensors()

    def scores(hidden: Tensor, output: Tensor) -> tuple[Tensor, ...]:
        found = fused(hidden, output, reference, reference_output, 4, 0.8)
        return tuple(found[i] for i in used)

    assert torch.autograd.gradcheck(scores, (hidden.requires_grad_(), output.requires_grad_()))


def test_without_a_reference_there_is_no_divergence():
    hidden, output, _, _ = tensors()
    assert ScoreTokens.apply(hidden, output, TARGETS, None, None, 1.0, 4, WHOLE)[2] is None


def test_a_certain_policy_has_no_entropy_and_no_nan():
    hidden, output = torch.tensor([[1e4]]), torch.tensor([[1.0], [0.0]])
    logprob, entropy, _ = ScoreTokens.apply(hidden, output, torch.tensor([0]), None, None, 1.0, 4, WHOLE)
    assert logprob.item() == 0.0
    assert entropy.item() == 0.0
