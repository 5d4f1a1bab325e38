"""Exactness of updates: repeated from the same state, an update gives the same weights to the bit, on any number of threads,
beside any load."""

import pytest
import torch
from torch import Tensor

from benchmarks.exactness import Repetition, repeat_update
from roll_core.algorithms.catalog import build_algorithm
from roll_core.batching.packing import PackingLimits
from roll_core.config.algorithm.methods import Grpo, Gspo, Kimi
from roll_core.config.model import ScratchModel
from roll_core.config.training.training import Packing, TrainingConfig
from roll_core.training.loss_inputs import loss_inputs
from roll_core.training.scorer import select_rows
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.critic import TorchCritic
from roll_core.training.torch.trainable import TorchSettings
from tests.micro_batches import cut, random_tokens
from tests.support import random_samples

MODEL = ScratchModel(max_positions=32)
SETTINGS = TorchSettings(TrainingConfig(), seed=3, temperature=1.0, device=torch.device("cpu"))
SAMPLES = random_samples(8)
BATCH = cut(SAMPLES, PackingLimits(4096, 128, Packing.SHARED_PROMPTS), random_tokens(SAMPLES))[0]


MANY_REPEATS = [pytest.param(num_threads, 500, 32, marks=pytest.mark.exhaustive) for num_threads in (1, 2, 4)]


@pytest.mark.parametrize(("num_threads", "repeats", "num_groups"), [(2, 20, 4), *MANY_REPEATS])
def test_a_repeated_update_gives_the_same_weights_beside_busy_processes(num_threads, repeats, num_groups):
    found = repeat_update(Repetition(num_threads, repeats, num_groups=num_groups, timed=0))
    assert list(found.outcomes.values()) == [repeats]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def operations(loss: Tensor) -> set[str]:
    """Names of the backward operations of a loss."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in seen}


@pytest.mark.parametrize("algorithm", [Grpo(), Gspo(), Kimi()], ids=lambda algorithm: algorithm.kind)
def test_no_backward_pass_of_a_policy_adds_with_atomics(algorithm):
    """IndexBackward0, the backward pass of an index with repeats, adds in any order on several threads."""
    backend = TorchBackend(MODEL, SETTINGS)
    loss = build_algorithm(algorithm, num_optimizer_steps=1, max_new_tokens=8).loss
    outputs = loss(loss_inputs(BATCH, backend._scorer(BATCH)))
    assert len(BATCH.predicted_by_N.unique()) < len(BATCH.predicted_by_N), "no index is repeated: nothing is tested"
    assert "IndexBackward0" not in operations(outputs.loss)


def test_no_backward_pass_of_a_critic_adds_with_atomics():
    assert "IndexBackward0" not in operations(TorchCritic(MODEL, SETTINGS)._scorer(BATCH).values_N.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_selected_with_the_gradients_of_an_index(dtype, one_thread):
    generator = torch.Generator().manual_seed(0)
    states_XH = torch.randn(50, 8, generator=generator).to(dtype).requires_grad_()
    index_N = torch.randint(0, 20, (400,), generator=generator)
    weights_NH = torch.randn(400, 8, generator=generator)
    ours, plain = (
        torch.autograd.grad((chosen_NH.float() * weights_NH).sum(), states_XH)[0]
        for chosen_NH in (select_rows(states_XH, index_N), states_XH[index_N])
    )
    assert torch.equal(ours, plain)
