"""Training by the megatron backend under layouts of every kind and their products: dense models and mixtures, all packings,
router losses, routing replay and frozen routers.

Every result must equal that of the torch backend. `tests/contracts/test_megatron_layouts.py` has a selection.
"""

import pytest
import torch

from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.layout import LayoutConfig as Layout
from roll_core.config.training.training import Packing
from roll_core.models.causal_lm import build_model
from roll_core.models.checkpoint_names import to_checkpoint_names
from tests.megatron_worlds import MODELS, Case, as_parameters, assert_close, run_worlds, torch_result

DENSE, MIXTURE, LLAMA = "qwen3", "qwen3_moe", "llama"
SHARED, ROWS, PADDED = Packing.SHARED_PROMPTS, Packing.ROWS, Packing.NONE
ON_2_RANKS = [
    Case(DENSE, Layout(), PADDED),
    Case(DENSE, Layout(tensor=2), PADDED),
    Case(DENSE, Layout(tensor=2), SHARED),
    Case(DENSE, Layout(pipeline=2), ROWS),
    Case(DENSE, Layout(pipeline=2, virtual_pipeline=2), SHARED),
    Case(DENSE, Layout(context=2), SHARED),
    Case(LLAMA, Layout(context=2), PADDED, recomputes=True),
    Case(LLAMA, Layout(tensor=2), ROWS, recomputes=True),
    Case(LLAMA, Layout(pipeline=2), PADDED),
    Case(MIXTURE, Layout(), ROWS),
    Case(MIXTURE, Layout(expert=2), PADDED),
    Case(MIXTURE, Layout(expert=2), SHARED, recomputes=True),
    Case(MIXTURE, Layout(tensor=2), ROWS),
    Case(MIXTURE, Layout(tensor=2, expert=2), ROWS),
    Case(MIXTURE, Layout(tensor=2, expert_tensor=2), PADDED),
    Case(MIXTURE, Layout(pipeline=2), SHARED),
]
ON_4_RANKS = [
    Case(DENSE, Layout(), SHARED),
    Case(DENSE, Layout(tensor=2), ROWS),
    Case(DENSE, Layout(tensor=2, pipeline=2), PADDED),
    Case(DENSE, Layout(tensor=2, context=2), SHARED),
    Case(DENSE, Layout(pipeline=2, context=2), ROWS),
    Case(DENSE, Layout(pipeline=4), SHARED),
    Case(DENSE, Layout(context=4), PADDED),
    Case(DENSE, Layout(pipeline=2, virtual_pipeline=2), PADDED),
    Case(LLAMA, Layout(tensor=2, pipeline=2, virtual_pipeline=2), SHARED),
    Case(MIXTURE, Layout(expert=2), SHARED),
    Case(MIXTURE, Layout(expert=4), PADDED),
    Case(MIXTURE, Layout(expert=2, pipeline=2), ROWS),
    Case(MIXTURE, Layout(expert=2, context=2), SHARED),
    Case(MIXTURE, Layout(tensor=2, expert=2), PADDED),
    Case(MIXTURE, Layout(tensor=2, expert=4), ROWS),
    Case(MIXTURE, Layout(tensor=2, expert=2, expert_tensor=2), SHARED),
    Case(MIXTURE, Layout(tensor=2, pipeline=2, expert=2), PADDED),
    Case(DENSE, Layout(tensor=2), loaded_under=Layout()),
    Case(DENSE, Layout(), loaded_under=Layout(tensor=2, pipeline=2)),
    Case(DENSE, Layout(pipeline=2, virtual_pipeline=2), loaded_under=Layout(tensor=2, context=2)),
    Case(LLAMA, Layout(pipeline=4), loaded_under=Layout(pipeline=2, virtual_pipeline=2)),
    Case(MIXTURE, Layout(expert=2), loaded_under=Layout()),
    Case(MIXTURE, Layout(tensor=2, expert=2, expert_tensor=2), loaded_under=Layout(expert=4)),
    Case(MIXTURE, Layout(expert=2, pipeline=2), loaded_under=Layout(tensor=2, expert=2)),
]
FROZEN = ExpertsConfig(freeze_router=True)
LOSSES = ExpertsConfig(balance_loss=0.1, z_loss=0.01)
"""Coefficients so large that a wrong router gradient shows beside the gradient of the policy's loss."""
REPLAY = ExpertsConfig(replay=True)
BOTH = ExpertsConfig(replay=True, balance_loss=0.1)
ROUTERS_ON_2_RANKS = [
    Case(MIXTURE, Layout(context=2), Packing.ROWS, experts=REPLAY),
    Case(MIXTURE, Layout(pipeline=2), Packing.NONE, recomputes=True, experts=REPLAY),
    Case(MIXTURE, Layout(pipeline=2, virtual_pipeline=2), experts=BOTH),
    Case(MIXTURE, Layout(context=2), Packing.ROWS, recomputes=True, experts=LOSSES),
    Case(MIXTURE, Layout(expert=2), Packing.NONE, loaded_under=Layout(pipeline=2), experts=LOSSES),
    Case(MIXTURE, Layout(pipeline=2, virtual_pipeline=2), Packing.NONE, experts=LOSSES),
    Case(MIXTURE, Layout(pipeline=2), Packing.ROWS, loaded_under=Layout(expert=2), experts=FROZEN),
]
ROUTERS_ON_4_RANKS = [
    Case(MIXTURE, Layout(), Packing.NONE, experts=REPLAY),
    Case(MIXTURE, Layout(tensor=2, expert=2), experts=REPLAY),
    Case(MIXTURE, Layout(tensor=2, pipeline=2), Packing.ROWS, recomputes=True, experts=REPLAY),
    Case(MIXTURE, Layout(tensor=2, context=2, expert=2), experts=BOTH),
    Case(MIXTURE, Layout(), experts=LOSSES),
    Case(MIXTURE, Layout(tensor=2, expert=2), experts=LOSSES),
    Case(MIXTURE, Layout(tensor=2, pipeline=2), Packing.ROWS, recomputes=True, experts=LOSSES),
    Case(MIXTURE, Layout(tensor=2, context=2, expert=2, expert_tensor=2), experts=LOSSES),
    Case(MIXTURE, Layout(tensor=2, expert=2), experts=FROZEN),
]
WORLDS = {2: ON_2_RANKS + ROUTERS_ON_2_RANKS, 4: ON_4_RANKS + ROUTERS_ON_4_RANKS}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_worlds(WORLDS, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(("num_ranks", "case"), as_parameters(WORLDS))
def test_training_under_a_layout_equals_training_by_the_torch_backend(num_ranks, case, results):
    assert_close(results(num_ranks, case), torch_result(case.model, case.experts))


@pytest.mark.parametrize(("num_ranks", "case"), [each for each in as_parameters(WORLDS) if each.values[1].experts is FROZEN])
def test_frozen_routers_stay_equal_to_the_bit_while_all_other_weights_move(num_ranks, case, results):
    before = dict(to_checkpoint_names((n, p.detach()) for n, p in build_model(MODELS[case.model], 3).named_parameters()))
    for after in (results(num_ranks, case), torch_result(case.model, case.experts)):
        unchanged = {name for name, tensor in after.weights.items() if torch.equal(tensor, before[name])}
        assert unchanged == {name for name in before if name.endswith("mlp.gate.weight")}
        assert after.gradients.keys() == before.keys() - unchanged
