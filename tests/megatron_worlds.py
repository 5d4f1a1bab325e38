"""Worlds of processes in which the megatron backend trains under one layout after another, and what the torch backend finds.

Imports cost more than all layouts together: a server imports once, the processes of a world are forked from it.
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
"""Of the first, second and third optimizer step; the last looks at the whole vocabulary, beside a reference."""
REFERENCE = ScratchModel(**SIZES | {"architecture": Architecture.LLAMA, "num_layers": 4})
# An epsilon that is not lost in the noise of numbers that are nearly zero: Adam would divide noise by noise.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, epsilon=1e-5, max_gradient_norm=1.0, weight_decay=0.01)


DATA = LayoutConfig()


@dataclass(frozen=True)
class Case:
    """A model under a layout, its batch packed in one way. With `loaded_under`, the first step is saved, and the rest goes
    on from there under that layout."""

    model: str
    layout: LayoutConfig = DATA
    packing: Packing = Packing.SHARED_PROMPTS
    recomputes: bool = False
    loaded_under: LayoutConfig | None = None
    experts: ExpertsConfig | None = None

    @property
    def name(self) -> str:
        parts = [self.model, _short(self.layout), {"none": "padded", "rows": "packed"}.get(self.packing, "shared prompts")]
        parts += ["recomputed"] if self.recomputes else []
        parts += [f"loaded under {_short(self.loaded_under)}"] if self.loaded_under is not None else []
        parts += list(self.experts.model_dump(exclude_defaults=True)) if self.experts is not None else []
        return ", ".join(parts)

    def training(self, layout: LayoutConfig) -> TrainingConfig:
        return TrainingConfig(
            backend=BackendKind.MEGATRON,
            layout=layout,
            activation_checkpointing=self.recomputes,
            logprob_chunk_tokens=7,
            experts=self.experts,
        )


@dataclass(frozen=True)
class Found:
    """What training came to: losses, gradient norms, logprobs and divergences (by place) of every step, gradients of the
    first, weights after the last, and losses of routers in every step, where they have any."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    scores: list[Tensor]
    weights: dict[str, Tensor]
    routers: list[Metrics]


ROUTER_LOSSES = ("experts/balance_loss", "experts/z_loss")


def _short(layout: LayoutConfig) -> str:
    changed = layout.model_dump(exclude_defaults=True)
    return " x ".join(f"{name} {size}" for name, size in changed.items()) or "data"


def micro_batches(case: Case, share: Share, step: int) -> list[MicroBatch]:
    """Several of a rank, of other tokens in every step."""
    samples = random_samples(NUM_SAMPLES, seed=step)
    if case.experts is not None and case.experts.replay:
        samples = [_recorded(sample) for sample in samples]
    row_tokens = 26 if case.packing is Packing.SHARED_PROMPTS else None
    limits = PackingLimits(52 // share.count, row_tokens, case.packing, share.row_multiple)
    return cut(samples, limits, random_tokens(samples, seed=step), rank=share.index, num_ranks=share.count)


def _recorded(sample: Sample) -> Sample:
    """With experts that no router chose, drawn by the tokens up to each, so that prompts that are shared have the same; and
    without any, if the first token says so."""
    if sample.token_ids[0] % 3 == 0:
        return sample
    layers, experts, chosen = SIZES["num_layers"], SIZES["num_experts"], MODELS["qwen3_moe"].experts_per_token
    rows = []
    for place in range(sample.num_tokens - 1):
        drawn = random.Random(hash(sample.token_ids[: place + 1]))
        rows.append([expert for _ in range(layers) for expert in drawn.sample(range(experts), chosen)])
    return replace(sample, experts=RoutedExperts.from_array(np.array(rows, dtype=np.int16), experts))


def train(case: Case, folder: Path, new_backend: Callable[[TrainingConfig], Any]) -> Found:
    """The steps of all losses, by this rank."""
    backend, found = new_backend(case.training(case.layout)), Found([], [], {}, [], {}, [])
    backend.start_optimizer(OPTIMIZER, total_steps=10)
    backend.build_frozen(Policy.REFERENCE, REFERENCE)
    for step, algorithm in enumerate(LOSSES):
        parts = micro_batches(case, backend.share, step)
        for scores in (backend.logprobs(parts, Policy.CURRENT), backend.divergences(parts)):
            found.scores.append(_of_all_shares(parts, scores, backend.share))
        loss = build_algorithm(algorithm, num_optimizer_steps=1, max_new_tokens=8).loss
        accumulate = backend.accumulate if algorithm.kl_loss is None else backend.accumulate_beside_reference
        accumulate(parts, loss)
        if step == 0:
            found.gradients.update((name, gradient.clone()) for name, gradient in _gradients(backend))
        metrics = backend.apply_gradients()
        found.losses.append(metrics["update/loss"])
        found.norms.append(metrics["update/gradient_norm"])
        found.routers.append({name: metrics[name] for name in ROUTER_LOSSES if name in metrics})
        if step == 0 and case.loaded_under is not None:
            backend.snapshot()(folder)
            dist.barrier()
            backend = new_backend(case.training(case.loaded_under))
            backend.start_optimizer(OPTIMIZER, total_steps=10)
            backend.build_frozen(Policy.REFERENCE, REFERENCE)
            backend.load(folder)
    found.weights.update((name, tensor.clone()) for name, tensor in backend.weights())
    return found


def _gradients(backend: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(backend, TorchBackend):
        return to_checkpoint_names((name.removeprefix("model."), gradient) for name, gradient in backend.gradients())
    return backend.gradients()


def _of_all_shares(parts: list[MicroBatch], scores: list[Tensor], share: Share) -> Tensor:
    values = torch.zeros(sum(sample.num_trained_tokens for sample in random_samples(NUM_SAMPLES, seed=0)) * 2)
    for part, each in zip(parts, scores, strict=True):
        values[part.token_index_N] = each if share.is_reporter else 0.0
    return reduce_over_ranks(values)


@cache
def expected(model: str, experts: ExpertsConfig | None = None) -> Found:
    """By the torch backend, in one process."""

    def new_backend(training: TrainingConfig) -> TorchBackend:
        torch_training = TrainingConfig(logprob_chunk_tokens=training.logprob_chunk_tokens, experts=training.experts)
        return TorchBackend(MODELS[model], TorchSettings(torch_training, 3, 1.0, torch.device("cpu")))

    return train(Case(model, experts=experts), Path(), new_backend)


Worlds = dict[int, list[Case]]
"""What is trained in a world of so many ranks."""


def named(worlds: Worlds) -> list[Any]:
    """The cases as parameters of a test."""
    return [pytest.param(ranks, case, id=f"{ranks} ranks: {case.name}") for ranks, cases in worlds.items() for case in cases]


def run_worlds(worlds: Worlds, folder: Path) -> Callable[[int, Case], Found]:
    """Train every case; what rank 0 found."""
    for num_ranks, cases in worlds.items():
        start_ranks(_in_rank, (num_ranks, cases, str(folder)), num_ranks)
    return lambda num_ranks, case: torch.load(folder / f"{num_ranks} ranks, {case.name}", weights_only=False)


def start_ranks(in_rank: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Processes that call this with their number and the arguments, until all are done or one fails."""
    mp.get_context("forkserver").set_forkserver_preload(["tests.megatron_worlds"])
    mp.start_processes(in_rank, arguments, nprocs=num_ranks, start_method="forkserver")


def _in_rank(rank: int, num_ranks: int, cases: list[Case], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{num_ranks}", rank=rank, world_size=num_ranks)
    try:
        for number, case in enumerate(cases):

            def new_backend(training: TrainingConfig, model: ScratchModel = MODELS[case.model]) -> MegatronBackend:
                return MegatronBackend(model, MegatronSettings(training, 3, 1.0, torch.device("cpu")))

            found = train(case, Path(folder) / f"checkpoint-{num_ranks}-{number}", new_backend)
            if rank == 0:
                torch.save(found, f"{folder}/{num_ranks} ranks, {case.name}")
    finally:
        dist.destroy_process_group()


def assert_equal(found: Found, wanted: Found) -> None:
    """Within 1e-5: of a loss, a logprob and a divergence, and of the largest number of a gradient and of a weight."""
    assert found.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-5)
    for values, wanted_values in zip(found.routers, wanted.routers, strict=True):
        assert values == pytest.approx(wanted_values, rel=1e-5)
    for mine, theirs in zip(found.scores, wanted.scores, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-5)
    for mine_by_name, theirs_by_name in ((found.gradients, wanted.gradients), (found.weights, wanted.weights)):
        assert mine_by_name.keys() == theirs_by_name.keys()
        for name, tensor in mine_by_name.items():
            largest = theirs_by_name[name].abs().max().item()
            torch.testing.assert_close(
                tensor, theirs_by_name[name], rtol=0.0, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
            )
