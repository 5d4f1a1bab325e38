"""Mismatch between sampler and trainer in real iterations of a tiny model, and the actions of `training.mismatch`.

The mismatch is near zero, unless the engine samples at another temperature than the trainer assumes.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll_core.batching.packing import PackingLimits
from roll_core.config.training.training import Packing
from roll_core.errors import SamplerMismatch
from roll_core.training.base import Share
from roll_core.training.mismatch import MismatchMeter
from roll_core.types.manifest import Metrics
from tests.in_process import InProcessLoop, warm_checkpoint
from tests.megatron_worlds import start_ranks
from tests.micro_batches import cut, random_tokens
from tests.support import random_samples, tiny_config

ROLLOUT = {"num_groups": 8, "group_size": 8, "max_new_tokens": 5}
# Source of the trainer's logprobs: anchors, which several optimizer steps need, or the forward pass of the first step.
FROM_ANCHORS, FROM_THE_FIRST_STEP = {"optimizer_steps": 2}, {"optimizer_steps": 1}
LEARNING = {"optimizer": {"learning_rate": 1e-3}}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return warm_checkpoint(tmp_path_factory.mktemp("start"))


def new_loop(start: Path, folder: Path, temperature: float, **sections: Any) -> InProcessLoop:
    """Training loop from the checkpoint `start` whose engine samples at a temperature, while the trainer assumes 1."""
    engine_config = tiny_config(folder, rollout=ROLLOUT | {"temperature": temperature})
    loop = InProcessLoop(tiny_config(folder, rollout=ROLLOUT, **sections), engine_config=engine_config)
    loop.learner._policy.load(start)
    return loop


def weights_of(loop: InProcessLoop) -> Weights:
    return {name: tensor.clone() for name, tensor in loop.learner.weights()}


def are_equal(some: Weights, others: Weights) -> bool:
    return all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def train_once(start: Path, folder: Path, temperature: float, **sections: Any) -> tuple[Weights, Metrics]:
    """Run one iteration; return the weights after it and its metrics."""
    loop = new_loop(start, folder, temperature, **sections)
    metrics = loop.iterate()
    return weights_of(loop), metrics


@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["anchors", "first step"])
def test_a_healthy_run_stays_far_below_the_limits(steps, start, tmp_path):
    training = LEARNING | steps | {"mismatch": {"action": "stop"}}
    loop = new_loop(start, tmp_path, 1.0, training=training)
    for _ in range(3):
        metrics = loop.iterate()
        assert metrics["mismatch/fresh_tokens"] > 100
        assert metrics["mismatch/mean"] < 1e-5
        assert metrics["mismatch/max"] < 1e-4
        assert metrics["mismatch/kl"] < 1e-8
        assert metrics["mismatch/ratio_p99"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["mismatch/share_off"] == metrics["mismatch/beyond"] == 0.0


@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["anchors", "first step"])
def test_an_engine_at_another_temperature_stops_the_run_before_the_policy_moves(steps, start, tmp_path):
    loop = new_loop(start, tmp_path, 1.3, training=LEARNING | steps | {"mismatch": {"action": "stop"}})
    before = weights_of(loop)
    with pytest.raises(SamplerMismatch) as caught:
        loop.iterate()
    sentence = str(caught.value)
    assert sentence.startswith("iteration 1 was not trained on: mismatch/mean is 0.")
    assert "above training.mismatch.max_mean (0.05)" in sentence
    assert "\n" not in sentence
    assert are_equal(before, weights_of(loop))
    # The refused iteration leaves no state behind: with the engine repaired, its repetition equals a healthy iteration.
    loop._engine_config, loop._iterations = loop._config, itertools.count(1)
    loop.iterate()
    healthy, _ = train_once(start, tmp_path, 1.0, training=LEARNING | steps)
    assert are_equal(weights_of(loop), healthy)


@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["anchors", "first step"])
def test_a_warning_changes_nothing_but_a_metric(steps, start, tmp_path):
    plain, measured = train_once(start, tmp_path, 1.3, training=LEARNING | steps)
    warned, metrics = train_once(start, tmp_path, 1.3, training=LEARNING | steps | {"mismatch": {"action": "warn"}})
    assert are_equal(plain, warned)
    assert metrics == measured | {"mismatch/beyond": 1.0}
    assert metrics["mismatch/mean"] > 0.1


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["several steps", "one step"])
def test_an_iteration_beyond_the_limits_trains_with_the_correction(kind, steps, start, tmp_path):
    gated = LEARNING | steps | {"mismatch": {"action": "correct"}}
    corrected, metrics = train_once(start, tmp_path, 1.3, algorithm={"kind": kind}, training=gated)
    algorithm = {"kind": kind, "correction": {}}
    expected, expected_metrics = train_once(start, tmp_path, 1.3, algorithm=algorithm, training=LEARNING | steps)
    plain, _ = train_once(start, tmp_path, 1.3, algorithm={"kind": kind}, training=LEARNING | steps)
    assert are_equal(corrected, expected)
    assert not are_equal(corrected, plain)
    assert metrics == expected_metrics | {"mismatch/beyond": 1.0}


@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["several steps", "one step"])
def test_an_iteration_within_the_limits_is_not_corrected(steps, start, tmp_path):
    gated = LEARNING | steps | {"mismatch": {"action": "correct"}}
    within, metrics = train_once(start, tmp_path, 1.0, training=gated)
    plain, _ = train_once(start, tmp_path, 1.0, training=LEARNING | steps)
    assert are_equal(within, plain)
    assert "correction/weight" not in metrics


def test_an_algorithm_that_weights_by_sampler_logprobs_itself_gets_no_correction(start, tmp_path):
    gated = LEARNING | {"mismatch": {"action": "correct"}}
    beyond, metrics = train_once(start, tmp_path, 1.3, algorithm={"kind": "tis"}, training=gated)
    plain, _ = train_once(start, tmp_path, 1.3, algorithm={"kind": "tis"}, training=LEARNING)
    assert metrics["mismatch/beyond"] == 1.0
    assert are_equal(beyond, plain)


class StaleLoop(InProcessLoop):
    """Training loop whose tokens carry a weights version one behind the learner's."""

    async def _collect(self, iteration: int):
        return await super()._collect(iteration - 1)


def test_stale_tokens_are_reported_but_not_compared_with_the_limits(start, tmp_path):
    training = LEARNING | {"mismatch": {"action": "stop"}}
    engine_config = tiny_config(tmp_path, rollout=ROLLOUT | {"temperature": 1.3})
    loop = StaleLoop(tiny_config(tmp_path, rollout=ROLLOUT, training=training), engine_config=engine_config)
    loop.learner._policy.load(start)
    next(loop._iterations)
    metrics = loop.iterate()
    assert metrics["mismatch/fresh_tokens"] == 0.0
    assert metrics["mismatch/stale_mean"] > 0.1
    limited = {name for name in metrics if name.startswith("mismatch/") and not name.startswith("mismatch/stale_")}
    assert limited == {"mismatch/fresh_tokens"}
    assert all(math.isfinite(value) for value in metrics.values())


NUM_SAMPLES = 9


def measure(rank: int, num_ranks: int) -> Metrics:
    """Mismatch metrics of random logprob differences, a third of them of stale tokens; a rank records its share."""
    samples = random_samples(NUM_SAMPLES)
    tokens = random_tokens(samples)
    generator = torch.Generator().manual_seed(5)
    trainer_logprobs_N = tokens.sampler_logprobs_N + torch.randn(len(tokens.turn_N), generator=generator)
    tokens.is_fresh_N[::3] = False
    meter = MismatchMeter(Share(rank, num_ranks, is_reporter=True))
    limits = PackingLimits(micro_batch_tokens=26, row_tokens=None, packing=Packing.ROWS)
    for micro_batch in cut(samples, limits, tokens, rank=rank, num_ranks=num_ranks):
        scored = micro_batch.with_signals(anchor_logprobs_N=trainer_logprobs_N[micro_batch.token_index_N])
        meter.record_anchors(scored.tokens)
    return meter.metrics()


def _in_rank(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    try:
        torch.save(measure(rank, num_ranks), f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


def test_two_ranks_measure_what_one_measures_percentiles_included(tmp_path):
    start_ranks(_in_rank, (2, str(tmp_path)), 2)
    expected = measure(0, 1)
    assert expected["mismatch/ratio_max"] > 2 > 1 > expected["mismatch/ratio_p01"]
    for rank in range(2):
        assert torch.load(tmp_path / str(rank)) == pytest.approx(expected, rel=1e-12)
