"""Expert load by both training backends: the same metrics; padding and passes that only compute logprobs do not count."""

from typing import Any

import pytest
import torch

from roll_core.algorithms.losses import cross_entropy
from roll_core.batching.packing import PackingLimits
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.training import Packing, TrainingConfig
from roll_core.training.base import Policy
from roll_core.training.megatron.backend import MegatronBackend, MegatronSettings
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.sample import Sample
from tests.micro_batches import cut, random_tokens

MIXTURE = ScratchModel(architecture=Architecture.QWEN3_MOE, max_positions=32, num_experts=4)
DENSE = ScratchModel(max_positions=32)


def backend(kind: str, model: ScratchModel) -> Any:
    training = TrainingConfig(backend=kind)
    built = (
        MegatronBackend(model, MegatronSettings(training, 3, 1.0, torch.device("cpu")))
        if kind == "megatron"
        else TorchBackend(model, TorchSettings(training, 3, 1.0, torch.device("cpu")))
    )
    built.start_optimizer(OptimizerConfig(learning_rate=1e-3), total_steps=10)
    return built


def loads(trained: Any, width_multiple: int = 1) -> dict[str, float]:
    """Train one step and return its metrics `experts/...`; rows are padded to a multiple of `width_multiple` tokens."""
    tokens_ST = torch.randint(2, 60, (12, 10), generator=torch.Generator().manual_seed(0))
    samples = [Sample(token_ids=tuple(ids), trained=(False,) * 4 + (True,) * 6) for ids in tokens_ST.tolist()]
    parts = cut(samples, PackingLimits(40, None, Packing.NONE, width_multiple), random_tokens(samples))
    trained.logprobs(parts, Policy.CURRENT)
    trained.accumulate(parts, cross_entropy)
    return {name: value for name, value in trained.apply_gradients().items() if name.startswith("experts/")}


def test_both_backends_measure_the_same_load_and_reset_it_at_every_step():
    megatron, in_torch = backend("megatron", MIXTURE), backend("torch", MIXTURE)
    first = loads(megatron)
    assert 1.0 < first["experts/max_load"] <= 2.0  # two of four experts per token: one gets at most twice its share
    assert first == pytest.approx(loads(in_torch))
    assert loads(megatron) == pytest.approx(loads(in_torch))


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_padding_does_not_count_as_load(kind):
    assert loads(backend(kind, MIXTURE), width_multiple=64) == pytest.approx(loads(backend(kind, MIXTURE)))


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_a_dense_model_reports_no_load(kind):
    assert loads(backend(kind, DENSE)) == {}
