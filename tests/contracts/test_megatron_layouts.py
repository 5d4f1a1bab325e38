"""Whatever the layout, the megatron backend finds what the torch backend finds. All layouts: `make megatron`."""

import pytest

from roll_core.config.training.layout import LayoutConfig as Layout
from roll_core.config.training.training import Packing
from tests.megatron_worlds import Case, assert_equal, expected, named, run_worlds

DENSE, MIXTURE, LLAMA = "qwen3", "qwen3_moe", "llama"
OF_TWO = [
    Case(DENSE, Layout(tensor=2)),
    Case(DENSE, Layout(pipeline=2, virtual_pipeline=2), Packing.NONE),
    Case(LLAMA, Layout(context=2), Packing.ROWS, recomputes=True),
    Case(MIXTURE, Layout(expert=2), Packing.NONE),
]
OF_FOUR = [
    Case(DENSE, Layout(), Packing.ROWS),
    Case(DENSE, Layout(tensor=2, pipeline=2), loaded_under=Layout(context=2)),
    Case(MIXTURE, Layout(tensor=2, expert=2)),
    Case(MIXTURE, Layout(expert=2, pipeline=2), Packing.NONE, loaded_under=Layout(tensor=2, expert=4)),
    Case(MIXTURE, Layout(tensor=2, expert=2, expert_tensor=2), Packing.ROWS),
]
WORLDS = {2: OF_TWO, 4: OF_FOUR}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_worlds(WORLDS, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(("num_ranks", "case"), named(WORLDS))
def test_a_layout_changes_nothing(num_ranks, case, found):
    assert_equal(found(num_ranks, case), expected(case.model))
