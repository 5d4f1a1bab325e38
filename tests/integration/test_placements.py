"""The tiny run in another shape: sharded trainer ranks, engines on their own devices, every signal, MLflow unreachable."""

import pytest

from roll_core.host import free_port
from roll_core.store.records.exports import read_exports


def test_two_sharded_ranks_and_two_engines_of_their_own_with_every_signal_while_the_tracker_is_down(workspace):
    chain = workspace.train(
        "cluster={devices_per_node: 4, threads_per_device: 1}",
        "placement={trainer: 0-1, engines: 2-3, reward_workers: 2}",
        "training={optimizer_steps: 2, optimizer: {learning_rate: 3.0e-4}}",  # small steps: KL is about symmetric
        "algorithm={kind: grpo, kl_loss: {coefficient: 0.01}, entropy_coefficient: 0.001}",
        f"tracking={{uri: 'http://127.0.0.1:{free_port()}', drain_seconds: 2}}",
    )
    assert [m.iteration for m in chain] == [0, 1, 2, 3]
    assert {"update/kl_to_reference", "update/entropy"} <= chain[-1].metrics.keys()
    first, last = chain[1].metrics, chain[-1].metrics
    # The reference is the policy the run began with, so in the first iteration it is the anchor, seen from the other side.
    assert first["update/kl_to_reference"] == pytest.approx(first["update/kl_to_anchor"], rel=0.3)
    assert first["update/kl_to_sampler"] == pytest.approx(first["update/kl_to_anchor"], rel=1e-3)
    assert last["update/kl_to_reference"] > last["update/kl_to_anchor"]
    (exported,) = read_exports(workspace.store, "tiny-1")
    assert exported.weights_digest == chain[-1].weights_digest, "gathered from both ranks when it was written"
    assert len(workspace.checkpoints()[-1].files) == 4, "one of each rank, the metadata, and the state of credit"
    spool = workspace.folder / "roll-data/work/tiny-1/tracking/events.jsonl"
    assert "reward/mean" in spool.read_text(), "what was logged is not in the spool for when MLflow is back"
