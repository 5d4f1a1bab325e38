"""Contract of router training by both training backends: frozen routers, balance loss, z-loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll_core.algorithms.losses import cross_entropy
from roll_core.batching.packing import PackingLimits
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.training import BackendKind, Packing, TrainingConfig
from roll_core.training.megatron.backend import MegatronBackend, MegatronSettings
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from tests.megatron_worlds import start_ranks
from tests.micro_batches import cut, random_tokens
from tests.support import MODEL_BACKENDS, random_samples

MIXTURE = ScratchModel(architecture=Architecture.QWEN3_MOE, max_positions=32, num_experts=4)
FROZEN = ExpertsConfig(freeze_router=True)
LOSSES = ExpertsConfig(balance_loss=0.1, z_loss=0.01)


@pytest.fixture(params=MODEL_BACKENDS)
def kind(request) -> BackendKind:
    return request.param


def new_backend(kind: BackendKind, experts: ExpertsConfig, **training: Any) -> Any:
    config = TrainingConfig(backend=kind, experts=experts, **training)
    built: Any
    match kind:
        case BackendKind.TORCH:
            built = TorchBackend(MIXTURE, TorchSettings(config, 3, 1.0, torch.device("cpu")))
        case BackendKind.MEGATRON:
            built = MegatronBackend(MIXTURE, MegatronSettings(config, 3, 1.0, torch.device("cpu")))
    built.start_optimizer(OptimizerConfig(learning_rate=1e-3, weight_decay=0.1), total_steps=10)
    return built


def step(backend: Any, seed: int) -> dict[str, float]:
    """Train one step on the samples of a seed; return its metrics."""
    samples = random_samples(12, seed)
    limits = PackingLimits(52, None, Packing.ROWS, backend.share.row_multiple)
    parts = cut(samples, limits, random_tokens(samples, seed), rank=backend.share.index, num_ranks=backend.share.count)
    backend.accumulate(parts, cross_entropy)
    return backend.apply_gradients()


def weights(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def is_router(name: str) -> bool:
    return name.endswith("mlp.gate.weight")


def assert_only_routers_unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    unchanged = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert unchanged == {name for name in before if is_router(name)}
    assert unchanged


# ------------------------------------------------------------------------------------------------------------ frozen routers
def test_frozen_routers_stay_equal_to_the_bit_while_all_other_weights_move_also_after_a_checkpoint(kind, tmp_path):
    backend = new_backend(kind, FROZEN)
    before = weights(backend)
    step(backend, 0)
    backend.snapshot()(tmp_path)
    step(backend, 1)
    assert_only_routers_unchanged(before, weights(backend))

    another = new_backend(kind, FROZEN)
    another.load(tmp_path)
    step(another, 1)
    expected = weights(backend)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(another).items())


def test_training_resumes_with_frozen_routers_from_a_checkpoint_of_trained_ones(kind, tmp_path):
    backend = new_backend(kind, ExpertsConfig())
    step(backend, 0)
    backend.snapshot()(tmp_path)
    frozen = new_backend(kind, FROZEN)
    frozen.load(tmp_path)
    step(frozen, 1)
    assert_only_routers_unchanged(weights(backend), weights(frozen))


def test_frozen_routers_stay_when_weights_are_sharded_over_ranks(tmp_path):
    start_ranks(_in_rank, (2, str(tmp_path)), 2)
    before = weights(new_backend(BackendKind.TORCH, FROZEN))
    assert_only_routers_unchanged(before, torch.load(tmp_path / "weights"))


def _in_rank(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    backend = new_backend(BackendKind.TORCH, FROZEN)
    step(backend, 0)
    backend.snapshot()(Path(folder) / "checkpoint")
    dist.barrier()
    backend = new_backend(BackendKind.TORCH, FROZEN)
    backend.load(Path(folder) / "checkpoint")
    step(backend, 1)
    found = weights(backend)
    if rank == 0:
        torch.save(found, f"{folder}/weights")
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- router losses
def test_both_backends_compute_the_same_router_losses_and_resume_with_them_from_a_checkpoint(tmp_path):
    found = {}
    for kind in MODEL_BACKENDS:
        backend, folder = new_backend(kind, LOSSES), tmp_path / kind
        metrics = [step(backend, 0)]
        backend.snapshot()(folder)
        metrics += [step(backend, seed) for seed in (1, 2)]
        another = new_backend(kind, LOSSES)
        another.load(folder)
        assert [step(another, seed) for seed in (1, 2)] == metrics[1:]
        found[kind] = [expert_metrics(each) for each in metrics]
    by_torch, by_megatron = found.values()
    for one, other in zip(by_torch, by_megatron, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert all(each["experts/balance_loss"] > 1.0 and each["experts/z_loss"] > 0.0 for each in by_torch)


def expert_metrics(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("experts/")}


def test_without_coefficients_there_are_no_router_losses(kind):
    assert expert_metrics(step(new_backend(kind, ExpertsConfig()), 0)).keys() == {
        "experts/max_load",
        "experts/mean_max_load",
        "experts/idle_share",
    }


def test_a_balance_loss_lowers_the_load_of_the_busiest_expert(kind):
    loads = {}
    for coefficient in (0.0, 0.3):
        backend = new_backend(kind, ExpertsConfig(balance_loss=coefficient))
        loads[coefficient] = [step(backend, seed)["experts/mean_max_load"] for seed in range(40)]
    without, balanced = (sum(load[-10:]) / 10 for load in loads.values())
    assert balanced < 0.9 * without


def test_a_z_loss_makes_router_logits_smaller(kind):
    z_losses = {}
    for coefficient in (1e-9, 0.1):
        backend = new_backend(kind, ExpertsConfig(z_loss=coefficient))
        z_losses[coefficient] = [step(backend, seed)["experts/z_loss"] for seed in range(15)][-1]
    without, with_loss = z_losses.values()
    assert with_loss < 0.9 * without
