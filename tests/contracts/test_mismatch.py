"""Sampler and trainer compared through real iterations of a tiny model: they agree, unless the engine is told to sample at
another temperature; and what `training.mismatch` makes of that."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from roll_core.batching.packing import PackingLimits
from roll_core.config.training.training import Packing
from roll_core.errors import SamplerMismatch
from roll_core.training.base import Share
from roll_core.training.mismatch import MismatchMeter
from roll_core.types.manifest import Metrics
from tests.in_process import InProcess, warm_checkpoint
from tests.micro_batches import cut, random_tokens
from tests.support import random_samples, tiny_config

ROLLOUT = {"num_groups": 8, "group_size": 8, "max_new_tokens": 5}
FROM_ANCHORS, FROM_THE_FIRST_STEP = {"optimizer_steps": 2}, {"optimizer_steps": 1}
LEARNING = {"optimizer": {"learning_rate": 1e-3}}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return warm_checkpoint(tmp_path_factory.mktemp("start"))


def loop_of(start: Path, folder: Path, temperature: float, **sections: Any) -> InProcess:
    """Engines sample at this temperature, whatever the trainer believes (1)."""
    told = tiny_config(folder, rollout=ROLLOUT | {"temperature": temperature})
    loop = InProcess(tiny_config(folder, rollout=ROLLOUT, **sections), sampled_by=told)
    loop.learner._policy.load(start)
    return loop


def weights_of(loop: InProcess) -> Weights:
    return {name: tensor.clone() for name, tensor in loop.learner.weights()}


def are_equal(some: Weights, others: Weights) -> bool:
    return all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def trained(start: Path, folder: Path, temperature: float, **sections: Any) -> tuple[Weights, Metrics]:
    loop = loop_of(start, folder, temperature, **sections)
    metrics = loop.iterate()
    return weights_of(loop), metrics


@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["anchors", "first step"])
def test_a_healthy_run_stays_far_below_the_limits(steps, start, tmp_path):
    training = LEARNING | steps | {"mismatch": {"action": "stop"}}
    loop = loop_of(start, tmp_path, 1.0, training=training)
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
    loop = loop_of(start, tmp_path, 1.3, training=LEARNING | steps | {"mismatch": {"action": "stop"}})
    before = weights_of(loop)
    with pytest.raises(SamplerMismatch) as caught:
        loop.iterate()
    sentence = str(caught.value)
    assert sentence.startswith("iteration 1 was not trained on: mismatch/mean is 0.")
    assert "above training.mismatch.max_mean (0.05)" in sentence
    assert "\n" not in sentence
    assert are_equal(before, weights_of(loop))
    # Nor is anything left of it: with the engine put right, the iteration is what it would have been.
    loop._sampled_by, loop._iterations = loop._config, itertools.count(1)
    loop.iterate()
    healthy, _ = trained(start, tmp_path, 1.0, training=LEARNING | steps)
    assert are_equal(weights_of(loop), healthy)


@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["anchors", "first step"])
def test_a_warning_changes_nothing_but_a_metric(steps, start, tmp_path):
    plain, measured = trained(start, tmp_path, 1.3, training=LEARNING | steps)
    warned, metrics = trained(start, tmp_path, 1.3, training=LEARNING | steps | {"mismatch": {"action": "warn"}})
    assert are_equal(plain, warned)
    assert metrics == measured | {"mismatch/beyond": 1.0}
    assert metrics["mismatch/mean"] > 0.1


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["several steps", "one step"])
def test_an_iteration_beyond_the_limits_trains_with_the_correction(kind, steps, start, tmp_path):
    gated = LEARNING | steps | {"mismatch": {"action": "correct"}}
    corrected, metrics = trained(start, tmp_path, 1.3, algorithm={"kind": kind}, training=gated)
    algorithm = {"kind": kind, "correction": {}}
    expected, expected_metrics = trained(start, tmp_path, 1.3, algorithm=algorithm, training=LEARNING | steps)
    plain, _ = trained(start, tmp_path, 1.3, algorithm={"kind": kind}, training=LEARNING | steps)
    assert are_equal(corrected, expected)
    assert not are_equal(corrected, plain)
    assert metrics == expected_metrics | {"mismatch/beyond": 1.0}


@pytest.mark.parametrize("steps", [FROM_ANCHORS, FROM_THE_FIRST_STEP], ids=["several steps", "one step"])
def test_an_iteration_within_the_limits_is_not_corrected(steps, start, tmp_path):
    gated = LEARNING | steps | {"mismatch": {"action": "correct"}}
    within, metrics = trained(start, tmp_path, 1.0, training=gated)
    plain, _ = trained(start, tmp_path, 1.0, training=LEARNING | steps)
    assert are_equal(within, plain)
    assert "correction/weight" not in metrics


def test_an_algorithm_that_weighs_by_the_sampler_anyway_stays_as_it_is(start, tmp_path):
    gated = LEARNING | {"mismatch": {"action": "correct"}}
    beyond, metrics = trained(start, tmp_path, 1.3, algorithm={"kind": "tis"}, training=gated)
    plain, _ = trained(start, tmp_path, 1.3, algorithm={"kind": "tis"}, training=LEARNING)
    assert metrics["mismatch/beyond"] == 1.0
    assert are_equal(beyond, plain)


class OfOlderWeights(InProcess):
    """The learner is one weights version ahead of what the tokens say."""

    async def _collect(self, iteration: int):
        return await super()._collect(iteration - 1)


def test_tokens_of_older_weights_are_reported_but_not_judged(start, tmp_path):
    training = LEARNING | {"mismatch": {"action": "stop"}}
    told = tiny_config(tmp_path, rollout=ROLLOUT | {"temperature": 1.3})
    loop = OfOlderWeights(tiny_config(tmp_path, rollout=ROLLOUT, training=training), sampled_by=told)
    loop.learner._policy.load(start)
    next(loop._iterations)
    metrics = loop.iterate()
    assert metrics["mismatch/fresh_tokens"] == 0.0
    assert metrics["mismatch/stale_mean"] > 0.1
    judged = {name for name in metrics if name.startswith("mismatch/") and not name.startswith("mismatch/stale_")}
    assert judged == {"mismatch/fresh_tokens"}
    assert all(math.isfinite(value) for value in metrics.values())


NUM_SAMPLES = 9


def noted(rank: int, num_ranks: int) -> Metrics:
    """Of random differences, some of them of older weights; a rank notes its share of the micro-batches."""
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
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    try:
        torch.save(noted(rank, num_ranks), f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


def test_two_ranks_find_what_one_finds_tails_included(tmp_path):
    mp.spawn(_in_rank, (2, str(tmp_path)), nprocs=2)
    expected = noted(0, 1)
    assert expected["mismatch/ratio_max"] > 2 > 1 > expected["mismatch/ratio_p01"]
    for rank in range(2):
        assert torch.load(tmp_path / str(rank)) == pytest.approx(expected, rel=1e-12)
