"""Training by the megatron backend must equal that by the torch backend: a selection of layouts and router settings.

`tests/megatron/test_all_layouts.py` has all of them.
"""

import pytest
import torch

from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.layout import LayoutConfig as Layout
from roll_core.config.training.training import Packing
from tests.megatron_worlds import Case, as_parameters, assert_close, run_worlds, torch_result

DENSE, MIXTURE, LLAMA = "qwen3", "qwen3_moe", "llama"
LOSSES = ExpertsConfig(balance_loss=0.1, z_loss=0.01)
"""Coefficients so large that a wrong router gradient shows beside the gradient of the policy's loss."""
REPLAY = ExpertsConfig(replay=True)
ON_2_RANKS = [
    Case(DENSE, Layout(tensor=2)),
    Case(DENSE, Layout(pipeline=2, virtual_pipeline=2), Packing.NONE),
    Case(LLAMA, Layout(context=2), Packing.ROWS, recomputes=True),
    Case(MIXTURE, Layout(expert=2), Packing.NONE, experts=LOSSES),
]
ON_4_RANKS = [
    Case(DENSE, Layout(tensor=2, pipeline=2), loaded_under=Layout(context=2)),
    Case(MIXTURE, Layout(expert=2, pipeline=2), Packing.NONE, loaded_under=Layout(tensor=2, expert=4)),
    Case(MIXTURE, Layout(tensor=2, expert=2), experts=REPLAY),
]
WORLDS = {2: ON_2_RANKS, 4: ON_4_RANKS}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_worlds(WORLDS, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(("num_ranks", "case"), as_parameters(WORLDS))
def test_training_under_a_layout_equals_training_by_the_torch_backend(num_ranks, case, results):
    assert_close(results(num_ranks, case), torch_result(case.model, case.experts))


def test_router_losses_change_the_gradients_that_are_compared():
    with_losses, without = torch_result(MIXTURE, LOSSES), torch_result(MIXTURE)
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(with_losses.gradients[router], without.gradients[router], rtol=0.1)
    assert all(set(each) == {"experts/balance_loss", "experts/z_loss"} for each in with_losses.router_losses)


def test_replay_changes_the_logprobs_that_are_compared():
    assert (torch_result(MIXTURE, REPLAY).scores[0] - torch_result(MIXTURE).scores[0]).abs().max() > 0.01
