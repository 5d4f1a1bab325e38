"""Weights checks: names and sampled columns of a policy, which later prove that an engine has it."""

import torch

from roll_core.weights.checks import (
    SAMPLE_ELEMENTS,
    SAMPLED_COLUMNS,
    SAMPLED_TENSORS,
    CheckRecorder,
    WeightsCheck,
    check_in_place,
)


def policy() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(1)
    dense = [(f"model.layers.{i}.mlp.up_proj.weight", torch.randn(5, 40)) for i in range(30)]
    experts = [(f"model.layers.{i}.mlp.experts.{i % 7}.up_proj.weight", torch.randn(5, 40)) for i in range(300)]
    return [
        ("model.embed_tokens.weight", torch.randn(SAMPLE_ELEMENTS, 3)),
        *dense,
        *experts,
        ("model.norm.weight", torch.randn(40)),
    ]


def recorded_check(version: int, tensors: list[tuple[str, torch.Tensor]]) -> WeightsCheck:
    recorder = CheckRecorder(version)
    assert list(recorder.observe(tensors)) == tensors
    return recorder.check


def test_tensors_in_place_are_sampled_like_streamed_ones():
    tensors = policy()
    for version in range(5):
        streamed, in_place = recorded_check(version, tensors), check_in_place(version, tensors)
        assert in_place.names == streamed.names
        expected = {sample.name: sample for sample in streamed.samples}
        assert {sample.name for sample in in_place.samples} == set(expected)
        for sample in in_place.samples:
            assert sample.columns == expected[sample.name].columns
            assert torch.equal(sample.values, expected[sample.name].values)


def test_experts_and_other_tensors_are_both_sampled_and_different_ones_in_each_version():
    chosen = [{sample.name for sample in check_in_place(version, policy()).samples} for version in range(3)]
    for names in chosen:
        assert (
            sum(".experts." in name for name in names) == sum(".experts." not in name for name in names) == SAMPLED_TENSORS
        )
    assert len({frozenset(names) for names in chosen}) == 3


def test_sampled_values_are_the_named_columns_and_large_tensors_have_fewer_columns():
    named = dict(policy())
    by_name = {s.name: s for version in range(30) for s in check_in_place(version, list(named.items())).samples}
    assert len(by_name["model.embed_tokens.weight"].columns) == 1
    assert len(by_name["model.norm.weight"].columns) == SAMPLED_COLUMNS
    for name, sample in by_name.items():
        assert torch.equal(sample.values, named[name][..., list(sample.columns)])
