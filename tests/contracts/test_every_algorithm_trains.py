"""Two real iterations of a tiny model with every algorithm of the catalogue, and with every setting they share."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_core.algorithms.catalog import TABLE
from roll_core.config.algorithm.policy_update import Signal
from tests.in_process import InProcessLoop, warm_checkpoint
from tests.support import tiny_config

ALGORITHMS: dict[str, dict[str, Any]] = {row.kind: {"kind": row.kind} for row in TABLE}
ALGORITHMS["distillation"] |= {
    "teachers": [{"kind": "pretrained", "model": {"kind": "scratch", "architecture": "llama", "max_positions": 32}}]
}

REFERENCE = {Signal.REFERENCE}
# Settings of `algorithm` by name, each with the signals that it needs.
VARIANTS: dict[str, tuple[dict[str, Any], set[Signal]]] = {
    "reinforce, normalised by the batch": (
        {"kind": "reinforce", "discount": 0.9, "shaping": {"normalize": {"mean": "batch", "std": "batch"}}},
        set(),
    ),
    "reinforce, normalised by running statistics": (
        {"kind": "reinforce", "shaping": {"normalize": {"mean": "running", "std": "running"}}},
        set(),
    ),
    "reinforce++ with group baseline": ({"kind": "reinforce_plus_plus", "baseline": "group"}, set()),
    "gspo by turn": ({"kind": "gspo", "level": "turn"}, set()),
    "kimi by token": ({"kind": "kimi", "level": "token"}, set()),
    "cispo with mask": ({"kind": "cispo", "mask_clipped": True}, set()),
    "mixed distillation": (ALGORITHMS["distillation"] | {"reward_weight": 0.5}, {Signal.TEACHER}),
    "ppo without value clip": ({"kind": "ppo", "critic": {"value_clip": None}, "trace_decay": 1.0}, {Signal.VALUES}),
    "k2 in the loss": ({"kind": "grpo", "kl_loss": {"estimator": "k2"}}, REFERENCE),
    "k3 in the loss": ({"kind": "grpo", "kl_loss": {"estimator": "k3"}}, REFERENCE),
    "absolute KL in the loss": ({"kind": "grpo", "kl_loss": {"estimator": "absolute"}}, REFERENCE),
    "full KL in the loss": ({"kind": "grpo", "kl_loss": {"estimator": "full"}}, set()),
    "KL in the reward": ({"kind": "ppo", "shaping": {"kl": {}}}, {Signal.VALUES, Signal.ANCHOR, Signal.REFERENCE}),
    "KL in the reward of gspo": ({"kind": "gspo", "shaping": {"kl": {}}}, {Signal.ANCHOR, Signal.REFERENCE}),
    "adaptive KL in the reward": ({"kind": "grpo", "shaping": {"kl": {"adaptive": {}}}}, {Signal.ANCHOR, Signal.REFERENCE}),
    "full KL in the reward": ({"kind": "rloo", "shaping": {"kl": {"estimator": "full"}}}, {Signal.DIVERGENCE}),
    "every correction": (
        {
            "kind": "grpo",
            "correction": {
                "weighting": {"level": "sequence", "upper": 1.2},
                "filters": [{"level": "geometric"}, {"compared": "difference", "lower": -0.2, "upper": 0.2}],
                "veto_below": 1e-4,
            },
        },
        set(),
    ),
    "every mask and weight": (
        {
            "kind": "grpo",
            "shaping": {
                "reward_clip": 0.4,
                "masks": {"truncated": False, "max_accuracy": 1.0, "wrong_above_tokens": 4},
                "weights": {"difficulty": {"first": 0.5, "last": 2.0}, "length": {"first": 1.5, "last": 0.5}},
            },
            "advantage_clip": 1.0,
            "whiten_advantages": True,
            "dual_clip": 3.0,
            "entropy_coefficient": 0.01,
        },
        set(),
    ),
    "shaping for one domain": ({"kind": "grpo", "domains": {"sort": {"reward_clip": 0.3}}}, set()),
    "mean over sequences of sums": ({"kind": "grpo", "aggregation": "sequence_mean_token_sum"}, set()),
    "mean over sequences of means": ({"kind": "grpo", "aggregation": "sequence_mean_token_mean"}, set()),
    "a fixed length": ({"kind": "grpo", "aggregation": "fixed_length", "fixed_length_tokens": 10}, set()),
}


class RecordingBackend:
    """Wrapper of a backend that records the signals it computes before the update."""

    def __init__(self, backend: Any):
        self._backend = backend
        self.computed: set[Signal] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def logprobs(self, micro_batches: Any, policy: str) -> list[torch.Tensor]:
        known = {"current": Signal.ANCHOR, "reference": Signal.REFERENCE}
        self.computed.add(known.get(policy, Signal.TEACHER))
        return self._backend.logprobs(micro_batches, policy)

    def divergences(self, micro_batches: Any) -> list[torch.Tensor]:
        self.computed.add(Signal.DIVERGENCE)
        return self._backend.divergences(micro_batches)

    def values(self, micro_batch: Any) -> Any:
        self.computed.add(Signal.VALUES)
        return self._backend.values(micro_batch)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return warm_checkpoint(tmp_path_factory.mktemp("start"))


def train(start: Path, tmp_path: Path, algorithm: dict[str, Any], **training: Any) -> set[Signal]:
    """Train two iterations from the checkpoint `start`; return the signals that were computed before their updates."""
    training = {"optimizer": {"learning_rate": 1e-3}} | training
    config = tiny_config(tmp_path, algorithm=algorithm, training=training)
    loop = InProcessLoop(config)
    loop.learner._policy.load(start)
    if config.algorithm.needs_reference:
        loop.learner.load_frozen("reference", start)
    policy, critic = RecordingBackend(loop.learner._policy), RecordingBackend(loop.learner._critic)
    loop.learner._policy, loop.learner._critic = policy, critic
    before = {name: tensor.clone() for name, tensor in loop.learner.weights()}
    for _ in range(2):
        metrics = loop.iterate()
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["update/gradient_norm"] > 0
    assert all(not torch.equal(tensor, before[name]) for name, tensor in loop.learner.weights())
    return policy.computed | critic.computed


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_an_algorithm_moves_the_policy_and_computes_only_the_signals_it_declares(kind, start, tmp_path):
    own = {"ppo": {Signal.VALUES}, "distillation": {Signal.TEACHER}}
    assert train(start, tmp_path, ALGORITHMS[kind]) == own.get(kind, set())


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_with_several_optimizer_steps_the_anchor_is_computed_if_the_objective_has_a_ratio_to_it(kind, start, tmp_path):
    without_ratio = {"reinforce", "rloo", "remax", "distillation", "tis", "topr"}
    computed = train(start, tmp_path, ALGORITHMS[kind], optimizer_steps=2)
    assert (Signal.ANCHOR in computed) == (kind not in without_ratio)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_moves_the_policy_and_computes_only_the_signals_it_declares(name, start, tmp_path):
    algorithm, signals = VARIANTS[name]
    assert train(start, tmp_path, algorithm) == signals
