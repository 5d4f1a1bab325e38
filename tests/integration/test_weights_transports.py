"""A run learns the same whatever its weights travel by, and goes on when an engine dies on the way."""

from collections.abc import Callable

import pytest

from roll_core.store.records.weights import recorded_weights
from tests.integration.conftest import Workspace

APART = (
    *("--set", "cluster={devices_per_node: 3, threads_per_device: 1}"),
    *("--set", "placement={trainer: [0], engines: 1-2}"),
)
"""Engines on devices of their own."""


@pytest.fixture(scope="module")
def digests_by_ray(new_workspace: Callable[[str], Workspace]) -> list[str]:
    """Of every iteration's policy, by the transport that CPUs take by themselves."""
    workspace = new_workspace("by-ray")
    done = workspace.roll("run", str(workspace.config), *APART)
    assert done.returncode == 0, done.stdout
    return [manifest.weights_digest for manifest in workspace.chain()]


def test_through_the_store_from_which_the_successor_of_the_only_engine_has_its_weights(workspace, digests_by_ray):
    """It dies when it has taken differences over; its successor begins with the version that is whole."""
    settings = "weights={transport: store, full_every: 3}"
    alone = ("--set", "placement.engines=[1]")
    done = workspace.roll_with("DyingEngine", "run", str(workspace.config), *APART, *alone, "--set", settings)
    assert done.returncode == 0, done.stdout
    assert (workspace.folder / "victim").exists()
    assert not (workspace.folder / "roll-data/work/tiny-1/leg-2").exists(), "the leg did not survive"
    assert [manifest.weights_digest for manifest in workspace.chain()] == digests_by_ray
    recorded = [each.weights for each in reversed(recorded_weights(workspace.store, "tiny-1"))]
    assert [(weights.version, weights.base is None) for weights in recorded] == [
        (0, True),
        (0, False),  # a run that begins shows that it can recover
        (1, False),
        (2, True),
        (3, False),
    ]
    assert [weights.weights_digest for weights in recorded[1:]] == digests_by_ray


def test_by_broadcast(workspace, digests_by_ray):
    done = workspace.roll("run", str(workspace.config), *APART, "--set", "weights.transport=broadcast")
    assert done.returncode == 0, done.stdout
    assert [manifest.weights_digest for manifest in workspace.chain()] == digests_by_ray


def test_a_broadcast_goes_on_without_who_is_killed_in_its_middle_and_who_does_not_join(workspace, digests_by_ray):
    settings = "weights={transport: broadcast, broadcast_seconds: 5}"
    done = workspace.roll_with("UnreliableReceiver", "run", str(workspace.config), *APART, "--set", settings)
    assert done.returncode == 0, done.stdout
    assert [manifest.weights_digest for manifest in workspace.chain()] == digests_by_ray
    assert (workspace.folder / "killed").exists()
    assert (workspace.folder / "absent").exists()
    legs = workspace.folder / "roll-data/work/tiny-1"
    assert not (legs / "leg-2").exists(), "the leg did not survive"
    said = "".join(path.read_text() for path in (legs / "leg-1").rglob("*_log.*"))
    assert "did not join the broadcast within 5 s (weights.broadcast_seconds)" in said


def test_a_vllm_engine_of_two_workers_agrees_with_the_trainer_about_weights_that_were_broadcast_to_both(workspace):
    done = workspace.roll(
        *("run", str(workspace.config), *APART, "--set", "iterations=2", "--set", "weights.transport=broadcast"),
        *("--set", "model.num_heads=2", "--set", "model.num_kv_heads=1"),
        *("--set", "inference={kind: vllm, tensor_parallel: 2}"),
    )
    assert done.returncode == 0, done.stdout
    assert [manifest.metrics["mismatch/max"] < 1e-4 for manifest in workspace.chain()[1:]] == [True, True]
