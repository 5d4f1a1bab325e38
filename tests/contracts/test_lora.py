"""Contract of `training.lora`: only the target matrices learn, and weights are published merged, as of a plain model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll_core.algorithms.losses import cross_entropy
from roll_core.batching.packing import PackingLimits
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.lora import LoraConfig, LoraTarget
from roll_core.config.training.training import Packing, TrainingConfig
from roll_core.models.causal_lm import build_model
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.planning.model_shape import lora_parameters, shape_of
from roll_core.training.base import Policy
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from tests.megatron_worlds import start_ranks
from tests.micro_batches import cut, random_tokens
from tests.support import random_samples

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8.0, targets=(LoraTarget.QUERY, LoraTarget.OUTPUT, LoraTarget.DOWN))


def model_of(architecture: Architecture) -> ScratchModel:
    return ScratchModel(architecture=architecture, max_positions=32, num_experts=4)


def new_backend(lora: LoraConfig | None, architecture: Architecture = Architecture.QWEN3) -> TorchBackend:
    backend = TorchBackend(model_of(architecture), TorchSettings(TrainingConfig(lora=lora), 3, 1.0, CPU))
    backend.start_optimizer(OptimizerConfig(learning_rate=1e-2, weight_decay=0.1), total_steps=10)
    return backend


def micro_batches(backend: TorchBackend, seed: int) -> list:
    samples, share = random_samples(12, seed), backend.share
    limits = PackingLimits(52, None, Packing.ROWS)
    return cut(samples, limits, random_tokens(samples, seed), rank=share.index, num_ranks=share.count)


def step(backend: TorchBackend, seed: int) -> None:
    backend.accumulate(micro_batches(backend, seed), cross_entropy)
    backend.apply_gradients()


def weights(backend: TorchBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


@pytest.mark.parametrize("architecture", list(Architecture))
def test_only_targets_learn_and_merged_weights_have_the_names_and_logprobs_of_a_plain_model(architecture):
    backend, plain = new_backend(LORA, architecture), new_backend(None, architecture)
    before = weights(backend)
    assert list(before) == list(weights(plain))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(plain).items())
    for seed in range(3):
        step(backend, seed)
    after = weights(backend)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    kinds = ("q_proj", "o_proj") if architecture is Architecture.QWEN3_MOE else ("q_proj", "o_proj", "down_proj")
    assert changed == {name for name in after if name.split(".")[-2] in kinds and "experts" not in name}
    merged = build_model(model_of(architecture), seed=3)
    with torch.no_grad():
        for (_, parameter), tensor in zip(to_checkpoint_names(merged.named_parameters()), after.values(), strict=True):
            parameter.copy_(tensor)
    plain._scorer.model.load_state_dict(merged.state_dict())
    batches = micro_batches(plain, 9)
    for found, expected in zip(
        backend.logprobs(batches, Policy.CURRENT), plain.logprobs(batches, Policy.CURRENT), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_training_resumes_from_a_checkpoint_to_the_bit(tmp_path):
    first = new_backend(LORA)
    step(first, 0)
    first.snapshot()(tmp_path / "checkpoint")
    step(first, 1)
    second = new_backend(LORA)
    second.load(tmp_path / "checkpoint")
    step(second, 1)
    assert all(torch.equal(tensor, weights(first)[name]) for name, tensor in weights(second).items())


def test_the_planner_counts_the_parameters_that_learn():
    backend = new_backend(LORA)
    shape = shape_of(model_of(Architecture.QWEN3))
    assert shape is not None
    learning = sum(parameter.numel() for parameter in backend._module.parameters() if parameter.requires_grad)
    assert learning == lora_parameters(shape, LORA)


def train_sharded(rank: int, num_ranks: int, folder: Path) -> None:
    """Train two steps as one of several ranks; rank 0 saves the weights."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    backend = new_backend(LORA)
    for seed in range(2):
        step(backend, seed)
    found = weights(backend)
    if rank == 0:
        torch.save(found, folder / "weights.pt")
    dist.destroy_process_group()


def test_two_ranks_learn_what_one_learns(tmp_path):
    start_ranks(train_sharded, (2, tmp_path), 2)
    alone = new_backend(LORA)
    for seed in range(2):
        step(alone, seed)
    together = torch.load(tmp_path / "weights.pt")
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(together[name], tensor, atol=1e-5, rtol=0)
