"""Training by the megatron backend under many layouts, in worlds of several ranks, and the same by the torch backend.

The processes of a world are forked from a fork server that has imported everything, since imports take longer than all
layouts together. Tests of the megatron backend compare the two results.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from roll_core.algorithms.catalog import build_algorithm
from roll_core.batching.micro_batch import MicroBatch
from roll_core.batching.packing import PackingLimits
from roll_core.config.algorithm.methods import AlgorithmConfig, Grpo, Gspo
from roll_core.config.algorithm.policy_update import Aggregation, KlLossConfig, RatioLevel
from roll_core.config.algorithm.shaping import KlEstimator
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind, Packing, TrainingConfig
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.training.base import Policy, Share
from roll_core.training.megatron.backend import MegatronBackend, MegatronSettings
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.manifest import Metrics
from roll_core.types.routing import RoutedExperts
from roll_core.types.sample import Sample
from roll_core.weights.ranks import reduce_over_ranks
from tests.micro_batches import cut, random_tokens
from tests.support import random_samples

NUM_SAMPLES = 12
SIZES = {"max_positions": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "num_experts": 4, "intermediate_size": 96}
MODELS = {architecture.value: ScratchModel(architecture=architecture, **SIZES) for architecture in Architecture}
LOSSES: tuple[AlgorithmConfig, ...] = (
    Grpo(entropy_coefficient=0.01, aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN),
    Gspo(level=RatioLevel.TURN, aggregation=Aggregation.FIXED_LENGTH),
    Grpo(kl_loss=KlLossConfig(coefficient=0.5, estimator=KlEstimator.FULL)),
)
"""Algorithms of the first, second and third optimizer step; the last has a full-vocabulary KL to a reference."""
REFERENCE = ScratchModel(**SIZES | {"architecture": Architecture.LLAMA, "num_layers": 4})
# A large epsilon: for gradients that are nearly zero, Adam would otherwise divide rounding noise by rounding noise.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, epsilon=1e-5, max_gradient_norm=1.0, weight_decay=0.01)


DATA = LayoutConfig()
"""Layout of data parallelism alone."""


@dataclass(frozen=True)
class Case:
    """Model, layout and packing of one training.

    With `loaded_under`, training saves a checkpoint after the first step and resumes from it under that layout.
    """

    model: str
    layout: LayoutConfig = DATA
    packing: Packing = Packing.SHARED_PROMPTS
    recomputes: bool = False
    loaded_under: LayoutConfig | None = None
    experts: ExpertsConfig | None = None

    @property
    def name(self) -> str:
        """Name of a test parameter and of a file."""
        parts = [
            self.model,
            _layout_name(self.layout),
            {"none": "padded", "rows": "packed"}.get(self.packing, "shared prompts"),
        ]
        parts += ["recomputed"] if self.recomputes else []
        parts += [f"loaded under {_layout_name(self.loaded_under)}"] if self.loaded_under is not None else []
        parts += list(self.experts.model_dump(exclude_defaults=True)) if self.experts is not None else []
        return ", ".join(parts)

    def training(self, layout: LayoutConfig) -> TrainingConfig:
        """Section `training` of this case under a layout."""
        return TrainingConfig(
            backend=BackendKind.MEGATRON,
            layout=layout,
            activation_checkpointing=self.recomputes,
            logprob_chunk_tokens=7,
            experts=self.experts,
        )


@dataclass(frozen=True)
class TrainingResult:
    """Numbers of one training, for comparison."""

    losses: list[float]
    """Loss of every step."""
    norms: list[float]
    """Gradient norm of every step."""
    gradients: dict[str, Tensor]
    """Gradients of the first step, by checkpoint name."""
    scores: list[Tensor]
    """Logprobs and divergences of every step, by token index."""
    weights: dict[str, Tensor]
    """Weights after the last step, by checkpoint name."""
    router_losses: list[Metrics]
    """Router losses of every step; empty metrics if they are off."""


ROUTER_LOSSES = ("experts/balance_loss", "experts/z_loss")


def _layout_name(layout: LayoutConfig) -> str:
    changed = layout.model_dump(exclude_defaults=True)
    return " x ".join(f"{name} {size}" for name, size in changed.items()) or "data"


def micro_batches(case: Case, share: Share, step: int) -> list[MicroBatch]:
    """Build this rank's micro-batches of a step; every step has other samples."""
    samples = random_samples(NUM_SAMPLES, seed=step)
    if case.experts is not None and case.experts.replay:
        samples = [_with_random_experts(sample) for sample in samples]
    row_tokens = 26 if case.packing is Packing.SHARED_PROMPTS else None
    limits = PackingLimits(52 // share.count, row_tokens, case.packing, share.row_multiple)
    return cut(samples, limits, random_tokens(samples, seed=step), rank=share.index, num_ranks=share.count)


def _with_random_experts(sample: Sample) -> Sample:
    """Add recorded experts that no router chose; a sample whose first token is divisible by 3 stays without.

    Experts of a position depend on the tokens up to it, so that a shared prompt has the same experts in all samples.
    """
    if sample.token_ids[0] % 3 == 0:
        return sample
    layers, experts, chosen = SIZES["num_layers"], SIZES["num_experts"], MODELS["qwen3_moe"].experts_per_token
    rows = []
    for position in range(sample.num_tokens - 1):
        rng = random.Random(hash(sample.token_ids[: position + 1]))
        rows.append([expert for _ in range(layers) for expert in rng.sample(range(experts), chosen)])
    return replace(sample, experts=RoutedExperts.from_array(np.array(rows, dtype=np.int16), experts))


def train(case: Case, folder: Path, new_backend: Callable[[TrainingConfig], Any]) -> TrainingResult:
    """Train one step with each algorithm of `LOSSES`, in this rank; `folder` takes the checkpoint."""
    backend, result = new_backend(case.training(case.layout)), TrainingResult([], [], {}, [], {}, [])
    backend.start_optimizer(OPTIMIZER, total_steps=10)
    backend.build_frozen(Policy.REFERENCE, REFERENCE)
    for step, algorithm in enumerate(LOSSES):
        parts = micro_batches(case, backend.share, step)
        for scores in (backend.logprobs(parts, Policy.CURRENT), backend.divergences(parts)):
            result.scores.append(_sum_over_shares(parts, scores, backend.share))
        loss = build_algorithm(algorithm, num_optimizer_steps=1, max_new_tokens=8).loss
        accumulate = backend.accumulate if algorithm.kl_loss is None else backend.accumulate_beside_reference
        accumulate(parts, loss)
        if step == 0:
            result.gradients.update((name, gradient.clone()) for name, gradient in _gradients(backend))
        metrics = backend.apply_gradients()
        result.losses.append(metrics["update/loss"])
        result.norms.append(metrics["update/gradient_norm"])
        result.router_losses.append({name: metrics[name] for name in ROUTER_LOSSES if name in metrics})
        if step == 0 and case.loaded_under is not None:
            backend.snapshot()(folder)
            dist.barrier()
            backend = new_backend(case.training(case.loaded_under))
            backend.start_optimizer(OPTIMIZER, total_steps=10)
            backend.build_frozen(Policy.REFERENCE, REFERENCE)
            backend.load(folder)
    result.weights.update((name, tensor.clone()) for name, tensor in backend.weights())
    return result


def _gradients(backend: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(backend, TorchBackend):
        return to_checkpoint_names((name.removeprefix("model."), gradient) for name, gradient in backend.gradients())
    return backend.gradients()


def _sum_over_shares(parts: list[MicroBatch], scores: list[Tensor], share: Share) -> Tensor:
    """Assemble the scores of all ranks, by token index."""
    values = torch.zeros(sum(sample.num_trained_tokens for sample in random_samples(NUM_SAMPLES, seed=0)) * 2)
    for part, each in zip(parts, scores, strict=True):
        values[part.token_index_N] = each if share.is_reporter else 0.0
    return reduce_over_ranks(values)


@cache
def torch_result(model: str, experts: ExpertsConfig | None = None) -> TrainingResult:
    """Result of the same training by the torch backend, in this process; cached."""

    def new_backend(training: TrainingConfig) -> TorchBackend:
        torch_training = TrainingConfig(logprob_chunk_tokens=training.logprob_chunk_tokens, experts=training.experts)
        return TorchBackend(MODELS[model], TorchSettings(torch_training, 3, 1.0, torch.device("cpu")))

    return train(Case(model, experts=experts), Path(), new_backend)


Worlds = dict[int, list[Case]]
"""Cases by the number of ranks of the world in which they are trained."""


def as_parameters(worlds: Worlds) -> list[Any]:
    """Parameters (num_ranks, case) of a test, with readable ids."""
    return [pytest.param(ranks, case, id=f"{ranks} ranks: {case.name}") for ranks, cases in worlds.items() for case in cases]


def run_worlds(worlds: Worlds, folder: Path) -> Callable[[int, Case], TrainingResult]:
    """Train every case in its world; return a function that reads the result of rank 0 for a case."""
    for num_ranks, cases in worlds.items():
        start_ranks(_in_rank, (num_ranks, cases, str(folder)), num_ranks)
    return lambda num_ranks, case: torch.load(folder / f"{num_ranks} ranks, {case.name}", weights_only=False)


def start_ranks(in_rank: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Call `in_rank(rank, *arguments)` in `num_ranks` processes; return when all are done, raise if one fails."""
    mp.get_context("forkserver").set_forkserver_preload(["tests.megatron_worlds"])
    mp.start_processes(in_rank, arguments, nprocs=num_ranks, start_method="forkserver")


def _in_rank(rank: int, num_ranks: int, cases: list[Case], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    try:
        for number, case in enumerate(cases):

            def new_backend(training: TrainingConfig, model: ScratchModel = MODELS[case.model]) -> MegatronBackend:
                return MegatronBackend(model, MegatronSettings(training, 3, 1.0, torch.device("cpu")))

            result = train(case, Path(folder) / f"checkpoint-{num_ranks}-{number}", new_backend)
            if rank == 0:
                torch.save(result, f"{folder}/{num_ranks} ranks, {case.name}")
    finally:
        dist.destroy_process_group()


def assert_close(result: TrainingResult, expected: TrainingResult) -> None:
    """Assert that two results differ by at most 1e-5.

    Losses, logprobs and divergences: absolute. Norms and router losses: relative. Gradients and weights: relative to the
    largest element of the tensor.
    """
    assert result.losses == pytest.approx(expected.losses, abs=1e-5)
    assert result.norms == pytest.approx(expected.norms, rel=1e-5)
    for values, expected_values in zip(result.router_losses, expected.router_losses, strict=True):
        assert values == pytest.approx(expected_values, rel=1e-5)
    for scores, expected_scores in zip(result.scores, expected.scores, strict=True):
        torch.testing.assert_close(scores, expected_scores, rtol=0.0, atol=1e-5)
    for tensors, expected_tensors in ((result.gradients, expected.gradients), (result.weights, expected.weights)):
        assert tensors.keys() == expected_tensors.keys()
        for name, tensor in tensors.items():
            largest = expected_tensors[name].abs().max().item()
            torch.testing.assert_close(
                tensor, expected_tensors[name], rtol=0.0, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
            )
