"""Training by the megatron backend must equal that by the torch backend: a selection of layouts. All: `make megatron`."""

import pytest

from roll_core.config.training.layout import LayoutConfig as Layout
from roll_core.config.training.training import Packing
from tests.megatron_worlds import Case, as_parameters, assert_close, run_worlds, torch_result

DENSE, MIXTURE, LLAMA = "qwen3", "qwen3_moe", "llama"
ON_2_RANKS = [
    Case(DENSE, Layout(tensor=2)),
    Case(DENSE, Layout(pipeline=2, virtual_pipeline=2), Packing.NONE),
    Case(LLAMA, Layout(context=2), Packing.ROWS, recomputes=True),
    Case(MIXTURE, Layout(expert=2), Packing.NONE),
]
ON_4_RANKS = [
    Case(DENSE, Layout(), Packing.ROWS),
    Case(DENSE, Layout(tensor=2, pipeline=2), loaded_under=Layout(context=2)),
    Case(MIXTURE, Layout(tensor=2, expert=2)),
    Case(MIXTURE, Layout(expert=2, pipeline=2), Packing.NONE, loaded_under=Layout(tensor=2, expert=4)),
    Case(MIXTURE, Layout(tensor=2, expert=2, expert_tensor=2), Packing.ROWS),
]
WORLDS = {2: ON_2_RANKS, 4: ON_4_RANKS}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_worlds(WORLDS, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(("num_ranks", "case"), as_parameters(WORLDS))
def test_training_under_a_layout_equals_training_by_the_torch_backend(num_ranks, case, results):
    assert_close(results(num_ranks, case), torch_result(case.model))
