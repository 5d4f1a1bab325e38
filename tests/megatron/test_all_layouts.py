"""Every kind of layout, and products of them, dense and with experts, packed and padded: what the torch backend finds."""

import pytest

from roll_core.config.training.layout import LayoutConfig as Layout
from roll_core.config.training.training import Packing
from tests.megatron_worlds import Case, assert_equal, expected, named, run_worlds

DENSE, MIXTURE, LLAMA = "qwen3", "qwen3_moe", "llama"
SHARED, ROWS, PADDED = Packing.SHARED_PROMPTS, Packing.ROWS, Packing.NONE
OF_TWO = [
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
OF_FOUR = [
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
WORLDS = {2: OF_TWO, 4: OF_FOUR}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_worlds(WORLDS, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(("num_ranks", "case"), named(WORLDS))
def test_a_layout_changes_nothing(num_ranks, case, found):
    assert_equal(found(num_ranks, case), expected(case.model))
