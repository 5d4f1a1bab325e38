"""A tiny mixture of experts, trained by Megatron on two ranks as an ordinary run, with router losses and routing replay: one
layout continues from the checkpoint of another, and a killed rank changes no bit."""

import pytest
import torch
from safetensors.torch import load_file

from roll_core.store.records.checkpoints import download_files
from roll_core.store.records.exports import read_exports
from roll_core.types.leg import LegEnding
from roll_core.types.manifest import Manifest
from tests.integration.conftest import Workspace
from tests.support import ROOT

CONFIG = ROOT / "configs/runs/qwen3-moe-tiny.yaml"
SHORT = (
    "iterations=6",
    "warm_start.steps=5",
    "rollout.num_groups=4",
    "evaluation.every=6",
    "evaluation.num_problems=16",
    "checkpoint.every=2",
    "tracking.uri=null",
    "training.experts={balance_loss: 0.01, z_loss: 0.001, replay: true}",
    "training.optimizer.epsilon=1e-5",  # with a smaller one Adam would turn the rounding of near-zero gradients into steps
)
PIPELINE = ("training.layout.tensor=1", "training.layout.expert=1", "training.layout.pipeline=2")


@pytest.fixture(scope="module")
def unbroken(new_workspace) -> tuple[Workspace, list[Manifest]]:
    """Workspace with the run whole-1, tensor 2 x expert 2, and its manifests."""
    workspace = new_workspace("megatron")
    return workspace, workspace.train(*SHORT, "name=whole", config=CONFIG)


def last_weights(workspace: Workspace, run_id: str) -> dict[str, torch.Tensor]:
    """Weights that a run exported at its end."""
    export, folder = read_exports(workspace.store, run_id)[-1], workspace.folder / f"{run_id} exported"
    download_files(workspace.store, export, folder)
    return load_file(folder / "model.safetensors")


def test_a_pipeline_continues_from_the_checkpoint_of_a_tensor_and_expert_parallel_run(unbroken):
    workspace, chain = unbroken
    assert all(m.metrics["experts/replayed_share"] > 0.5 and m.metrics["experts/z_loss"] > 0 for m in chain[1:])
    forked = workspace.fork("whole-1", 4, *PIPELINE, "name=forked")
    assert [m.weights_digest for m in forked[:5]] == [m.weights_digest for m in chain[:5]]
    # The same weights, so the same rollouts; a pipeline then adds gradients up in another order.
    expected = last_weights(workspace, "whole-1")
    for name, tensor in last_weights(workspace, "forked-1").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0.0, atol=1e-5)


@pytest.mark.exhaustive
def test_a_killed_rank_changes_no_bit(unbroken):
    workspace, chain = unbroken
    run = workspace.open(*SHORT, "name=killed", config=CONFIG)
    with workspace.when_committed(3, lambda: workspace.kill("trainer rank 1", run_id="killed-1"), "killed-1"):
        assert workspace.run_leg(run).ending is LegEnding.FAILED
    assert workspace.run_leg(run, leg=2).ending is LegEnding.FINISHED
    resumed = workspace.chain("killed-1")
    assert {manifest.leg for manifest in resumed} == {1, 2}
    assert [m.weights_digest for m in resumed] == [m.weights_digest for m in chain]
