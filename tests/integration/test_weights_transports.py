"""A run learns the same whatever transport its weights take, and continues when an engine dies during a transfer."""

from collections.abc import Callable

import pytest

from roll_core.store.records.weights import recorded_weights
from roll_core.types.leg import LegEnding
from tests.integration.conftest import Workspace
from tests.integration.faulty_roles import DyingEngine, UnreliableReceiver, use

APART = ("cluster={devices_per_node: 3, threads_per_device: 1}", "placement={trainer: [0], engines: 1-2}")
"""Engines on devices of their own."""


@pytest.fixture(scope="module")
def digests_by_ray(new_workspace: Callable[[str], Workspace]) -> list[str]:
    """Digests of every iteration's policy, by the transport that `auto` chooses for CPUs."""
    return [manifest.weights_digest for manifest in new_workspace("by-ray").train(*APART)]


@pytest.mark.exhaustive
def test_through_the_store_from_which_the_replacement_of_the_only_engine_gets_its_weights(
    workspace, digests_by_ray, monkeypatch
):
    """The engine dies after it has adopted deltas; its replacement begins with the last full version."""
    use(monkeypatch, DyingEngine)
    chain = workspace.train(*APART, "placement.engines=[1]", "weights={transport: store, full_every: 3}")
    assert (workspace.folder / "victim").exists()
    assert {manifest.leg for manifest in chain} == {1}, "the leg did not survive"
    assert [manifest.weights_digest for manifest in chain] == digests_by_ray
    recorded = [each.weights for each in reversed(recorded_weights(workspace.store, "tiny-1"))]
    assert [(weights.version, weights.base is None) for weights in recorded] == [
        (0, True),
        (0, False),  # a new run goes through recovery once, and publishes version 0 again
        (1, False),
        (2, True),
        (3, False),
    ]
    assert [weights.weights_digest for weights in recorded[1:]] == digests_by_ray


def test_a_broadcast_continues_without_engines_that_are_killed_during_it_or_do_not_join(
    workspace, digests_by_ray, monkeypatch, caplog
):
    use(monkeypatch, UnreliableReceiver)
    run = workspace.open(*APART, "weights={transport: broadcast, broadcast_seconds: 5}")
    ended = workspace.run_leg(run)
    assert ended.ending is LegEnding.FINISHED, ended.cause
    assert [manifest.weights_digest for manifest in workspace.chain()] == digests_by_ray
    assert (workspace.folder / "killed").exists()
    assert (workspace.folder / "absent").exists()
    assert "did not join the broadcast within 5 s (weights.broadcast_seconds)" in caplog.text


@pytest.mark.exhaustive
def test_by_broadcast(workspace, digests_by_ray):
    chain = workspace.train(*APART, "weights.transport=broadcast")
    assert [manifest.weights_digest for manifest in chain] == digests_by_ray


@pytest.mark.exhaustive
def test_a_vllm_engine_of_two_workers_agrees_with_the_trainer_about_weights_that_were_broadcast_to_both(workspace):
    chain = workspace.train(
        *APART,
        *("iterations=2", "weights.transport=broadcast", "model.num_heads=2", "model.num_kv_heads=1"),
        "inference={kind: vllm, tensor_parallel: 2}",
    )
    assert [manifest.metrics["mismatch/max"] < 1e-4 for manifest in chain[1:]] == [True, True]
