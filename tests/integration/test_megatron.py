"""A tiny mixture of experts, trained by Megatron on two ranks, as an ordinary run: killed, and gone on with elsewhere."""

import os
import signal

import torch
from safetensors.torch import load_file

from tests.support import ROOT

CONFIG = str(ROOT / "configs/runs/qwen3-moe-tiny.yaml")
SHORT = [
    "iterations=5",
    "warm_start.steps=5",
    "rollout.num_groups=4",
    "evaluation.every=5",
    "evaluation.num_problems=16",
    "checkpoint.every=2",
]
PIPELINE = ["training.layout.tensor=1", "training.layout.expert=1", "training.layout.pipeline=2"]


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def weights(workspace, place: str) -> dict[str, torch.Tensor]:
    folder = workspace.folder / place.replace("@", "-at-")
    exported = workspace.roll("export", place, str(folder))
    assert exported.returncode == 0, exported.stdout
    return load_file(folder / "model.safetensors")


def test_a_rank_that_is_killed_costs_no_bit_and_another_layout_goes_on_from_its_checkpoint(workspace):
    whole = workspace.roll("run", CONFIG, *settings(*SHORT, "name=whole"))
    assert whole.returncode == 0, whole.stdout

    process = workspace.start("run", CONFIG, *settings(*SHORT, "name=killed"))
    workspace.wait_for_iteration(3, "killed-1")
    os.kill(workspace.pid_of("trainer rank 1", run_id="killed-1"), signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    unbroken, resumed = workspace.chain("whole-1"), workspace.chain("killed-1")
    assert {manifest.leg for manifest in resumed} == {1, 2}
    assert [m.weights_digest for m in resumed] == [m.weights_digest for m in unbroken]

    # The same rollouts, since the weights are the same, and an update by a pipeline: sums in another order.
    forked = workspace.roll("fork", "whole-1@2", *settings(*PIPELINE, "name=forked", "iterations=4"))
    assert forked.returncode == 0, forked.stdout
    elsewhere = workspace.chain("forked-1")
    assert [m.weights_digest for m in elsewhere[:3]] == [m.weights_digest for m in unbroken[:3]]
    before, after, there = (weights(workspace, place) for place in ("whole-1@2", "whole-1@4", "forked-1@4"))
    for name, tensor in after.items():
        moved = (tensor - before[name]).abs().max().item()
        torch.testing.assert_close(there[name], tensor, rtol=0.0, atol=0.02 * moved)
