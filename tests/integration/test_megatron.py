"""A tiny mixture of experts, trained by Megatron on two ranks, as an ordinary run: killed, and gone on with elsewhere. Its
routers have losses of their own, and replay what the engine chose."""

import os
import signal

import torch
from safetensors.torch import load_file

from roll_core.store.records.checkpoints import download_files
from roll_core.store.records.exports import read_exports
from tests.support import ROOT

CONFIG = str(ROOT / "configs/runs/qwen3-moe-tiny.yaml")
SHORT = [
    "iterations=6",
    "warm_start.steps=5",
    "rollout.num_groups=4",
    "evaluation.every=6",
    "evaluation.num_problems=16",
    "checkpoint.every=2",
    "training.experts={balance_loss: 0.01, z_loss: 0.001, replay: true}",
    "training.optimizer.epsilon=1e-5",  # of numbers that are nearly zero Adam would make what rounding makes of them
]
PIPELINE = ["training.layout.tensor=1", "training.layout.expert=1", "training.layout.pipeline=2"]


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def last_weights(workspace, run_id: str) -> dict[str, torch.Tensor]:
    """Of the policy that a run stores when it is done."""
    export, folder = read_exports(workspace.store, run_id)[-1], workspace.folder / f"{run_id} exported"
    download_files(workspace.store, export, folder)
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
    assert all(m.metrics["experts/replayed_share"] > 0.5 and m.metrics["experts/z_loss"] > 0 for m in unbroken[1:])

    # The same weights, so the same rollouts; then updates by a pipeline, which adds up in another order.
    forked = workspace.roll("fork", "whole-1@4", *settings(*PIPELINE, "name=forked"))
    assert forked.returncode == 0, forked.stdout
    elsewhere = workspace.chain("forked-1")
    assert [m.weights_digest for m in elsewhere[:5]] == [m.weights_digest for m in unbroken[:5]]
    wanted = last_weights(workspace, "whole-1")
    for name, tensor in last_weights(workspace, "forked-1").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0.0, atol=1e-5)
