"""Contract of routing replay: both training backends send each token to the experts that the engine recorded for it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll_core.algorithms.losses import cross_entropy
from roll_core.batching.packing import PackingLimits
from roll_core.config.rollout import InFlightPolicy
from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.training import BackendKind, Packing
from roll_core.inference.base import WeightsUpdate, adopt
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.torch_engine import TorchEngine
from roll_core.models.causal_lm import build_model
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.training.base import Policy
from roll_core.types.routing import merge_routing
from roll_core.types.sample import Sample
from tests.contracts.test_routers import MIXTURE, new_backend
from tests.in_process import InProcessLoop
from tests.micro_batches import cut
from tests.support import MODEL_BACKENDS, tiny_config

REPLAY = ExpertsConfig(replay=True)
NO_STOP = (999,)
PROMPTS = [(5, 6, 7), (9, 8), (30, 31, 32, 33, 34)]
REQUESTS = [GenerationRequest(str(i), PROMPTS[i % 3], 12, 1.0, NO_STOP, seed=i) for i in range(24)]
NOISE = 0.03
"""Standard deviation of noise on router weights, whose own is 0.06."""


@pytest.fixture(params=MODEL_BACKENDS)
def kind(request) -> BackendKind:
    return request.param


def engine_weights(noise: float) -> dict[str, Tensor]:
    """Weights of the trainer, with noise on the routers."""
    generator = torch.Generator().manual_seed(0)
    named = to_checkpoint_names((name, p.detach()) for name, p in build_model(MIXTURE, 3).named_parameters())
    return {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator) if "mlp.gate." in name else tensor
        for name, tensor in named
    }


async def recording_engine(noise: float) -> TorchEngine:
    """Engine that records experts; its routers have noise."""
    engine = TorchEngine(MIXTURE, seed=0, num_slots=7, device=torch.device("cpu"), dtype=torch.float32)
    engine.record_experts()
    await adopt(engine, WeightsUpdate(0, engine_weights(noise).items()), InFlightPolicy.FINISH)
    return engine


def generate(noise: float = 0.0) -> list[Completion]:
    """Generate completions of `REQUESTS` with an engine whose routers have noise."""

    async def generate_all() -> list[Completion]:
        engine = await recording_engine(noise)
        return await asyncio.gather(*(engine.generate(request) for request in REQUESTS))

    return asyncio.run(generate_all())


def samples_of(completions: list[Completion]) -> list[Sample]:
    return [
        Sample(
            request.prompt_ids + completion.token_ids,
            (False,) * len(request.prompt_ids) + (True,) * len(completion.token_ids),
            completion.experts,
        )
        for request, completion in zip(REQUESTS, completions, strict=True)
    ]


def trainer_logprobs(backend: Any, samples: list[Sample]) -> Tensor:
    """Logprobs of all trained tokens, in the order of the samples."""
    micro_batches = cut(samples, PackingLimits(64, 40, Packing.SHARED_PROMPTS))
    all_logprobs_N = torch.zeros(sum(sample.num_trained_tokens for sample in samples))
    for micro_batch, logprobs_N in zip(micro_batches, backend.logprobs(micro_batches, Policy.CURRENT), strict=True):
        all_logprobs_N[micro_batch.token_index_N] = logprobs_N
    return all_logprobs_N


def mismatch(backend: Any, completions: list[Completion]) -> float:
    """Mean |log(trainer / sampler)| over all tokens of the completions."""
    sampler_N = torch.tensor([logprob for completion in completions for logprob in completion.sampler_logprobs])
    return (trainer_logprobs(backend, samples_of(completions)) - sampler_N).abs().mean().item()


# -------------------------------------------------------------------------------------------------------------------- engine
def test_an_engine_records_the_experts_of_every_token_but_the_last_also_across_an_interruption():
    async def generate_in_pieces() -> list[Completion]:
        engine = await recording_engine(0.0)
        pending = [asyncio.create_task(engine.generate(request)) for request in REQUESTS]
        while not any(task.done() for task in pending):
            await asyncio.sleep(0)
        await engine.abort(*(request.request_id for request in REQUESTS))
        parts = await asyncio.gather(*pending)
        rest = [
            await engine.generate(replace(request, prefix_ids=part.token_ids)) if len(part.token_ids) < 12 else None
            for request, part in zip(REQUESTS, parts, strict=True)
        ]
        assert sum(0 < len(part.token_ids) < 12 for part in parts) > 3
        return [
            part if more is None else replace(more, experts=merge_routing(part.experts, more.experts))
            for part, more in zip(parts, rest, strict=True)
        ]

    whole = generate()
    for request, completion, pieces in zip(REQUESTS, whole, asyncio.run(generate_in_pieces()), strict=True):
        assert completion.experts is not None
        assert completion.experts.num_tokens == len(request.prompt_ids) + 11
        assert pieces.experts == completion.experts


def test_an_engine_records_no_experts_unless_told_to():
    async def generate_one() -> Completion:
        engine = TorchEngine(MIXTURE, seed=0, num_slots=7, device=torch.device("cpu"), dtype=torch.float32)
        return await engine.generate(REQUESTS[0])

    assert asyncio.run(generate_one()).experts is None


# ------------------------------------------------------------------------------------------------------------------- trainer
def test_replay_changes_nothing_if_trainer_and_engine_have_the_same_weights(kind):
    samples = samples_of(generate())
    plain, replaying = (trainer_logprobs(new_backend(kind, experts), samples) for experts in (ExpertsConfig(), REPLAY))
    assert torch.equal(plain, replaying)


def test_samples_without_recorded_experts_are_routed_by_the_trainer(kind):
    samples = [replace(sample, experts=None) for sample in samples_of(generate())]
    plain, replaying = (trainer_logprobs(new_backend(kind, experts), samples) for experts in (ExpertsConfig(), REPLAY))
    assert torch.equal(plain, replaying)


def test_recorded_experts_are_ignored_without_replay(kind):
    recorded = samples_of(generate(NOISE))
    unrecorded = [replace(sample, experts=None) for sample in recorded]
    backend = new_backend(kind, ExpertsConfig())
    assert torch.equal(trainer_logprobs(backend, recorded), trainer_logprobs(backend, unrecorded))


def test_replay_lowers_the_mismatch_with_an_engine_whose_routers_differ(kind):
    completions = generate(NOISE)
    without = mismatch(new_backend(kind, ExpertsConfig()), completions)
    assert mismatch(new_backend(kind, REPLAY), completions) < 0.6 * without


def test_routers_get_gradients_through_the_replayed_experts(kind):
    backend, samples = new_backend(kind, REPLAY), samples_of(generate(NOISE))
    backend.accumulate(cut(samples, PackingLimits(64, 40, Packing.SHARED_PROMPTS)), cross_entropy)
    gradients = {name: gradient for name, gradient in backend.gradients() if name.endswith("gate.weight")}
    assert len(gradients) == MIXTURE.num_layers
    assert all(gradient.abs().max() > 1e-5 for gradient in gradients.values())


def test_replay_lowers_the_mismatch_with_an_engine_in_bfloat16(kind, tmp_path):
    found = {}
    for replays in (False, True):
        config = tiny_config(
            tmp_path / str(replays),
            model={"kind": "scratch", "max_positions": 32, "architecture": "qwen3_moe", "init_std": 0.2},
            training={"backend": kind, "experts": {"replay": replays}},
            rollout={"num_groups": 16, "group_size": 8, "max_new_tokens": 8},
        )
        found[replays] = InProcessLoop(config, engine_dtype=torch.bfloat16).iterate()
    assert found[True]["mismatch/mean"] < 0.9 * found[False]["mismatch/mean"]
    assert found[True]["experts/replayed_share"] > 0.7
    assert "experts/replayed_share" not in found[False]
