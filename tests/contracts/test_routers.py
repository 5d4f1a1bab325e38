"""How routers are trained, by both training backends."""

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
from tests.support import random_samples

MIXTURE = ScratchModel(architecture=Architecture.QWEN3_MOE, max_positions=32, num_experts=4)
FROZEN = ExpertsConfig(freeze_router=True)
LOSSES = ExpertsConfig(balance_loss=0.1, z_loss=0.01)


@pytest.fixture(params=list(BackendKind))
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
    samples = random_samples(12, seed)
    limits = PackingLimits(52, None, Packing.ROWS, backend.share.row_multiple)
    parts = cut(samples, limits, random_tokens(samples, seed), rank=backend.share.index, num_ranks=backend.share.count)
    backend.accumulate(parts, cross_entropy)
    return backend.apply_gradients()


def weights(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def is_router(name: str) -> bool:
    return name.endswith("mlp.gate.weight")


def assert_routers_stay(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    still = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert still == {name for name in before if is_router(name)}
    assert still


# ------------------------------------------------------------------------------------------------------------------ freezing
def test_frozen_routers_stay_to_the_bit_while_all_else_moves_also_from_a_checkpoint(kind, tmp_path):
    backend = new_backend(kind, FROZEN)
    before = weights(backend)
    step(backend, 0)
    backend.snapshot()(tmp_path)
    step(backend, 1)
    assert_routers_stay(before, weights(backend))

    another = new_backend(kind, FROZEN)
    another.load(tmp_path)
    step(another, 1)
    wanted = weights(backend)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(another).items())


def test_a_checkpoint_of_trained_routers_is_gone_on_from_with_frozen_ones(kind, tmp_path):
    backend = new_backend(kind, ExpertsConfig())
    step(backend, 0)
    backend.snapshot()(tmp_path)
    frozen = new_backend(kind, FROZEN)
    frozen.load(tmp_path)
    step(frozen, 1)
    assert_routers_stay(weights(backend), weights(frozen))


def test_frozen_routers_stay_when_ranks_share_out_the_weights(tmp_path):
    start_ranks(_in_rank, (2, str(tmp_path)), 2)
    before = weights(new_backend(BackendKind.TORCH, FROZEN))
    assert_routers_stay(before, torch.load(tmp_path / "weights"))


def _in_rank(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
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


# -------------------------------------------------------------------------------------------------------------------- losses
def test_both_backends_find_the_same_losses_of_routers_and_go_on_with_them_from_a_checkpoint(tmp_path):
    found = {}
    for kind in BackendKind:
        backend, folder = new_backend(kind, LOSSES), tmp_path / kind
        metrics = [step(backend, 0)]
        backend.snapshot()(folder)
        metrics += [step(backend, seed) for seed in (1, 2)]
        another = new_backend(kind, LOSSES)
        another.load(folder)
        assert [step(another, seed) for seed in (1, 2)] == metrics[1:]
        found[kind] = [values_of(each) for each in metrics]
    ours, theirs = found.values()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert all(each["experts/balance_loss"] > 1.0 and each["experts/z_loss"] > 0.0 for each in ours)


def values_of(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("experts/")}


def test_without_coefficients_there_are_no_losses_of_routers(kind):
    assert values_of(step(new_backend(kind, ExpertsConfig()), 0)).keys() == {
        "experts/max_load",
        "experts/mean_max_load",
        "experts/idle_share",
    }


def test_a_balance_loss_makes_the_busiest_expert_less_busy(kind):
    loads = {}
    for coefficient in (0.0, 0.3):
        backend = new_backend(kind, ExpertsConfig(balance_loss=coefficient))
        loads[coefficient] = [step(backend, seed)["experts/mean_max_load"] for seed in range(40)]
    alone, balanced = (sum(load[-10:]) / 10 for load in loads.values())
    assert balanced < 0.9 * alone


def test_a_z_loss_makes_logits_of_routers_smaller(kind):
    squares = {}
    for coefficient in (1e-9, 0.1):
        backend = new_backend(kind, ExpertsConfig(z_loss=coefficient))
        squares[coefficient] = [step(backend, seed)["experts/z_loss"] for seed in range(15)][-1]
    alone, kept = squares.values()
    assert kept < 0.9 * alone
