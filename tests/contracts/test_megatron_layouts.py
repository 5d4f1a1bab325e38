"""Whatever the layout, the megatron backend finds what the torch backend finds. All layouts: `make megatron`."""

import pytest
import torch

from roll_core.config.layout import LayoutConfig as Layout
from roll_core.config.training import Packing
from tests.megatron_worlds import Case, assert_equal, expected, run_world

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
WORLDS = {2: {case.name: case for case in OF_TWO}, 4: {case.name: case for case in OF_FOUR}}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folders = {num_ranks: tmp_path_factory.mktemp(f"world-of-{num_ranks}") for num_ranks in WORLDS}
    for num_ranks, cases in WORLDS.items():
        run_world(cases, num_ranks, folders[num_ranks])
    return folders


@pytest.mark.parametrize(("num_ranks", "name"), [(ranks, name) for ranks, cases in WORLDS.items() for name in cases])
def test_a_layout_changes_nothing(num_ranks, name, worlds):
    found = torch.load(worlds[num_ranks] / name, weights_only=False)
    assert_equal(found, expected(WORLDS[num_ranks][name].model))
