"""Whatever the layout, routers are trained as the torch backend trains them, or as little."""

import pytest
import torch

from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.layout import LayoutConfig as Layout
from roll_core.config.training.training import Packing
from roll_core.models.causal_lm import build_model
from roll_core.models.checkpoint_names import to_checkpoint_names
from tests.megatron_worlds import MODELS, Case, assert_equal, expected, named, run_worlds

MIXTURE = "qwen3_moe"
FROZEN = ExpertsConfig(freeze_router=True)
LOSSES = ExpertsConfig(balance_loss=0.1, z_loss=0.01)
"""Large ones: a wrong gradient would be seen beside that of the policy's loss."""
REPLAY = ExpertsConfig(replay=True)
BOTH = ExpertsConfig(replay=True, balance_loss=0.1)
OF_TWO = [
    Case(MIXTURE, Layout(context=2), Packing.ROWS, experts=REPLAY),
    Case(MIXTURE, Layout(pipeline=2), Packing.NONE, recomputes=True, experts=REPLAY),
    Case(MIXTURE, Layout(pipeline=2, virtual_pipeline=2), experts=BOTH),
    Case(MIXTURE, Layout(context=2), Packing.ROWS, recomputes=True, experts=LOSSES),
    Case(MIXTURE, Layout(expert=2), Packing.NONE, loaded_under=Layout(pipeline=2), experts=LOSSES),
    Case(MIXTURE, Layout(pipeline=2, virtual_pipeline=2), Packing.NONE, experts=LOSSES),
    Case(MIXTURE, Layout(pipeline=2), Packing.ROWS, loaded_under=Layout(expert=2), experts=FROZEN),
]
OF_FOUR = [
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
WORLDS = {2: OF_TWO, 4: OF_FOUR}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_worlds(WORLDS, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(("num_ranks", "case"), named(WORLDS))
def test_a_layout_changes_nothing(num_ranks, case, found):
    assert_equal(found(num_ranks, case), expected(case.model, case.experts))


@pytest.mark.parametrize(("num_ranks", "case"), [each for each in named(WORLDS) if each.values[1].experts is FROZEN])
def test_frozen_routers_stay_what_they_are_to_the_bit_and_all_else_moves(num_ranks, case, found):
    before = dict(to_checkpoint_names((n, p.detach()) for n, p in build_model(MODELS[case.model], 3).named_parameters()))
    for after in (found(num_ranks, case), expected(case.model, case.experts)):
        still = {name for name, tensor in after.weights.items() if torch.equal(tensor, before[name])}
        assert still == {name for name in before if name.endswith("mlp.gate.weight")}
        assert after.gradients.keys() == before.keys() - still


def test_losses_of_routers_are_some_of_what_is_compared():
    with_them, without = expected(MIXTURE, LOSSES), expected(MIXTURE)
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(with_them.gradients[router], without.gradients[router], rtol=0.1)
    assert all(set(each) == {"experts/balance_loss", "experts/z_loss"} for each in with_them.routers)


def test_replay_is_some_of_what_is_compared():
    assert (expected(MIXTURE, REPLAY).scores[0] - expected(MIXTURE).scores[0]).abs().max() > 0.01
