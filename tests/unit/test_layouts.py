"""Layouts of the megatron backend: shards and memory of a rank, proposed layouts, and refusals with a layout that works."""

from itertools import pairwise

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flows import cli
from roll_core.config.load import load_config
from roll_core.config.model import ModelShape
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.errors import UserError
from roll_core.planning.fits import check_memory
from roll_core.planning.layout_checks import check_divides, layout_faults
from roll_core.planning.memory import PROCESS_GB, MemoryFit, gpu_memory, judge_memory, layers_in_flight, trainer_memory
from roll_core.planning.model_shape import parameters_of, shape_of
from roll_core.planning.proposals import propose, with_layout
from roll_core.planning.sharding import weights_of_stages
from roll_core.planning.time_model import iteration_time, update_time
from tests.support import ROOT

LARGE, MIDDLE = (ROOT / f"configs/runs/{name}.yaml" for name in ("qwen3-moe", "qwen3-moe-30b"))
TINY_DENSE = ModelShape(
    hidden=8, intermediate=12, layers=4, heads=4, kv_heads=2, head_size=2, vocabulary=10, has_head_norms=False
)
DEVICE_GB = 79 * 2**30 / 1e9


def config_and_shape(path=LARGE, *overrides: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(path, overrides)
    shape = shape_of(config.model)
    assert shape is not None
    return config, shape


# ----------------------------------------------------------------------------------------------------------- published sizes
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("0.6b", 0.596, 0.596),
        ("1.7b", 1.721, 1.721),
        ("4b", 4.022, 4.022),
        ("8b", 8.191, 8.191),
        ("14b", 14.768, 14.768),
        ("32b", 32.762, 32.762),
        ("30b-a3b", 30.532, 3.353),
        ("235b-a22b", 235.094, 22.191),
    ],
)
def test_models_have_the_published_number_of_parameters(name, total, active):
    parameters = parameters_of(shape_in(name))
    assert parameters.total / 1e9 == pytest.approx(total, abs=1e-3)
    assert parameters.active / 1e9 == pytest.approx(active, abs=1e-3)


def shape_in(name: str) -> ModelShape:
    return ModelShape.model_validate(
        yaml.safe_load((ROOT / f"configs/models/qwen3-{name}.yaml").read_text())["model"]["shape"]
    )


# ------------------------------------------------------------------------------------------------------------------ sharding
@pytest.mark.parametrize(
    ("layers", "pipeline", "chunks", "expected"),
    [
        (48, 4, 1, (12, 12, 12, 12)),
        (48, 2, 3, (8, 8, 8, 8, 8, 8)),
        (94, 8, 1, (11, 12, 12, 12, 12, 12, 12, 11)),
        (94, 2, 1, (47, 47)),
        (94, 16, 1, (5, *(6,) * 14, 5)),
        (94, 5, 1, None),
        (2, 4, 1, None),
    ],
)
def test_layers_are_split_evenly_or_the_first_and_the_last_chunk_have_one_less(layers, pipeline, chunks, expected):
    assert LayoutConfig(pipeline=pipeline, virtual_pipeline=chunks).layers_of_chunks(layers) == expected


def test_a_rank_has_its_shard_of_every_matrix_and_all_norms():
    # attention: 2 x 8 x (4 + 2) x 2 = 192; MLP: 3 x 8 x 12 = 288; norms: 16; embedding or output table: 10 x 8 = 80, half 40
    first, last = weights_of_stages(TINY_DENSE, LayoutConfig(tensor=2, pipeline=2), range(2))
    assert (first.layers, first.shared, first.experts) == (2, 2 * (96 + 144 + 16) + 40, 0)
    assert last.shared == first.shared + 8  # the output table instead of the embedding, and the last norm


@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 8, 16]),
    expert=st.sampled_from([1, 2, 8, 128]),
    expert_tensor=st.sampled_from([1, 2]),
)
def test_the_shards_of_all_ranks_add_up_to_the_model(tensor, pipeline, expert, expert_tensor):
    _, shape = config_and_shape()
    layout = LayoutConfig(tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor)
    stages, whole = weights_of_stages(shape, layout, range(pipeline)), parameters_of(shape)
    copied = (tensor - 1) * (whole.norms + whole.router)
    assert tensor * sum(s.shared for s in stages) == pytest.approx(whole.total - whole.experts + copied)
    assert expert * expert_tensor * sum(s.experts for s in stages) == pytest.approx(whole.experts)


def test_a_tied_embedding_is_copied_to_the_last_stage():
    tied = TINY_DENSE.model_copy(update={"is_tied": True})
    (alone,) = weights_of_stages(tied, LayoutConfig(), range(1))
    assert alone.total == parameters_of(tied).total
    assert sum(s.total for s in weights_of_stages(tied, LayoutConfig(pipeline=2), range(2))) == alone.total + 80


# -------------------------------------------------------------------------------------------------------------------- memory
def test_more_copies_of_the_model_shard_the_optimizer_state_alone():
    _, shape = config_and_shape(MIDDLE)
    once, twice = (
        trainer_memory(load_config(MIDDLE, [f"placement.trainer=0-{last}", "placement.engines=62-63"]), shape)
        for last in (15, 31)
    )
    assert (once.weights, once.gradients, once.activations) == (twice.weights, twice.gradients, twice.activations)
    assert once.optimizer == pytest.approx(2 * twice.optimizer)
    assert once.gradients == pytest.approx(2 * once.weights)  # gradients in float32, weights in bfloat16


def test_the_first_stages_have_the_most_layers_in_flight():
    assert [layers_in_flight(6, stage, LayoutConfig(pipeline=4)) for stage in range(4)] == [24, 18, 12, 6]
    # 2 x 3 + 4 + 1 = 11 chunks of 3 layers, then 9, 7 and 5
    interleaved = LayoutConfig(pipeline=4, virtual_pipeline=2)
    assert [layers_in_flight(6, stage, interleaved) for stage in range(4)] == [33, 27, 21, 15]


@pytest.mark.parametrize(("key", "value"), [("tensor", 4), ("context", 4), ("expert", 8), ("pipeline", 8)])
def test_every_kind_of_parallelism_lowers_the_peak_of_a_rank(key, value):
    config, shape = config_and_shape(LARGE, "training.layout={}")
    alone, shared = (trainer_memory(with_layout(config, LayoutConfig(**size), True), shape) for size in ({}, {key: value}))
    assert shared.peak < alone.peak


def test_activation_checkpointing_keeps_less_and_takes_longer():
    config, shape = config_and_shape()
    plain, recomputing = (with_layout(config, config.training.layout, recomputes) for recomputes in (False, True))
    assert trainer_memory(recomputing, shape).activations < trainer_memory(plain, shape).activations / 5
    assert update_time(recomputing, shape).total > 1.2 * update_time(plain, shape).total


# ----------------------------------------------------------------------------------------------------------------- proposals
def test_proposed_layouts_fit_and_divide_and_are_sorted_by_time():
    config, shape = config_and_shape()
    proposals = propose(config, shape, DEVICE_GB)
    assert len(proposals) > 100
    seconds = [proposal.update.total for proposal in proposals]
    assert all(later >= earlier - 0.01 for earlier, later in pairwise(seconds))
    for proposal in proposals:
        assert proposal.verdict is judge_memory(proposal.gpu_gb, DEVICE_GB) is MemoryFit.FITS
        assert not layout_faults(proposal.layout, shape)
        assert 256 % proposal.layout.ranks_per_copy == 256 % proposal.layout.ranks_per_expert_copy == 0


@pytest.mark.parametrize("path", [LARGE, MIDDLE])
def test_the_layouts_of_the_large_runs_are_within_a_twentieth_of_the_quickest(path):
    config, shape = config_and_shape(path)
    assert update_time(config, shape).total <= 1.05 * propose(config, shape, DEVICE_GB)[0].update.total


@settings(max_examples=30)
@given(st.sampled_from(["teraflops", "memory_gb", "node_gb", "network_gb"]))
def test_slower_machines_are_never_quicker(key):
    config, shape = config_and_shape()
    slower = load_config(LARGE, [f"cluster.speed.{key}=10"])
    assert iteration_time(slower, shape, DEVICE_GB).total > iteration_time(config, shape, DEVICE_GB).total


def test_a_longer_pipeline_has_a_larger_bubble_and_chunks_shrink_it():
    config, shape = config_and_shape(MIDDLE)
    bubbles = [
        update_time(with_layout(config, LayoutConfig(**sizes), False), shape).bubble
        for sizes in ({"pipeline": 2}, {"pipeline": 4}, {"pipeline": 4, "virtual_pipeline": 3})
    ]
    assert bubbles[2] < bubbles[1] / 2
    assert bubbles[0] < bubbles[1]


# ------------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"tensor": 8},
            r"training.layout.tensor \(8\) must divide the model's 64 heads and 4 key-value heads: set it to 4$",
        ),
        ({"pipeline": 5}, r"training.layout.pipeline \(5\) must divide the model's 94 layers, or .*: set it to 4 or 6$"),
        ({"expert": 48}, r"training.layout.expert \(48\) must divide the 128 experts of a layer: set it to 32 or 64$"),
        ({"expert_tensor": 5}, r"training.layout.expert_tensor \(5\) must divide the 1536 features .*: set it to 4 or 6$"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_sizes_that_do(layout, message):
    _, shape = config_and_shape()
    with pytest.raises(UserError, match=message):
        check_divides(LayoutConfig(**layout), shape)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.layout.tensor=8"], "training.layout.tensor (8) must divide the model's 64 heads"),
        (
            ["training.layout.pipeline=24"],
            "tensor x pipeline x context (192) must divide the 256 devices of placement.trainer: set "
            "training.layout.pipeline=16, or name 384 devices",
        ),
        (
            ["training.layout.expert=64"],
            "expert x pipeline (1024) must divide the 256 devices of placement.trainer: set training.layout.expert=16",
        ),
        (
            ["training.optimizer_steps=3"],
            "rollout.num_groups (512) must be a multiple of training.optimizer_steps (3), which take the same number each: "
            "set rollout.num_groups=513 or training.optimizer_steps=2",
        ),
        (["training.backend=torch"], "training.layout is for training.backend megatron"),
        (["training.backend=torch", "training.layout={}"], "set training.backend=megatron"),
        (["inference.tensor_parallel=4"], "set inference.tensor_parallel=8"),
        (["training.layout={}"], "GB of a GPU that has 85"),
    ],
)
def test_roll_plan_refuses_a_config_by_its_key(capsys, overrides, message):
    assert cli.main(["plan", str(LARGE), *(word for each in overrides for word in ("--set", each))]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("overrides", [["training.layout={}"], ["training.layout.context=1"], ["training.layout.expert=1"]])
def test_the_layout_that_a_refusal_advises_fits(overrides):
    config, shape = config_and_shape(LARGE, *overrides)
    with pytest.raises(UserError) as refused:
        check_memory(config, shape, DEVICE_GB)
    advised = [word for word in str(refused.value).split() if word.startswith("training.")]
    check_memory(load_config(LARGE, [*overrides, *advised]), shape, DEVICE_GB)


def test_a_layout_that_needs_nine_tenths_of_a_gpu_is_tight_in_the_plan_and_among_the_proposals(capsys):
    config, shape = config_and_shape(MIDDLE)
    needed_gib = gpu_memory(config, shape, DEVICE_GB).updating * 1e9 / 2**30
    for share, verdict in ((0.89, "fits"), (0.91, "tight")):
        assert cli.main(["plan", str(MIDDLE), "--set", f"cluster.device_memory_gib={needed_gib / share}"]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[0] == verdict
    assert cli.main(["plan", str(MIDDLE), "--set", f"cluster.device_memory_gib={needed_gib / 1.01}"]) == 2
    assert "too many" in capsys.readouterr().err


def test_where_no_layout_fits_with_a_margin_the_tight_ones_are_proposed():
    config, shape = config_and_shape(MIDDLE)
    layouts = [proposal.layout for proposal in propose(config, shape, 1e6)]
    least = PROCESS_GB + min(trainer_memory(with_layout(config, layout, True), shape).peak for layout in layouts)
    proposals = propose(config, shape, least / 0.95)
    assert proposals
    assert {proposal.verdict for proposal in proposals} == {MemoryFit.TIGHT}
    assert not propose(config, shape, least / 1.05)


def test_a_batch_smaller_than_the_number_of_copies_is_refused_with_one_that_is_not():
    overrides = ["rollout.num_groups=4", "rollout.group_size=2", "training.layout.context=1", "training.layout.pipeline=2"]
    with pytest.raises(UserError, match=r"must be at least the copies .* \(32\): set rollout.num_groups=64"):
        load_config(LARGE, overrides)
    load_config(LARGE, [*overrides, "rollout.num_groups=64"])


@pytest.mark.parametrize("path", [LARGE, MIDDLE])
def test_roll_plan_accepts_the_large_runs_and_prints_the_decision_first(capsys, path):
    assert cli.main(["plan", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("in short")
    assert "GB on the fullest GPU that trains" in lines[1]
    assert "none is quicker" in lines[2]
    assert "GPU-hours" in lines[4]
