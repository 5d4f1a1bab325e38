"""Routing replay: tokens go to the experts that they went to in the engine, in both training backends."""

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
from tests.in_process import InProcess
from tests.micro_batches import cut
from tests.support import tiny_config

REPLAY = ExpertsConfig(replay=True)
NO_STOP = (999,)
PROMPTS = [(5, 6, 7), (9, 8), (30, 31, 32, 33, 34)]
REQUESTS = [GenerationRequest(str(i), PROMPTS[i % 3], 12, 1.0, NO_STOP, seed=i) for i in range(24)]
NOISE = 0.03
"""Of routers' weights, whose standard deviation is 0.06."""


@pytest.fixture(params=list(BackendKind))
def kind(request) -> BackendKind:
    return request.param


def weights_of_engine(noise: float) -> dict[str, Tensor]:
    """Those of the trainer, but for its routers."""
    generator = torch.Generator().manual_seed(0)
    named = to_checkpoint_names((name, p.detach()) for name, p in build_model(MIXTURE, 3).named_parameters())
    return {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator) if "mlp.gate." in name else tensor
        for name, tensor in named
    }


async def served(noise: float) -> TorchEngine:
    engine = TorchEngine(MIXTURE, seed=0, num_slots=7, device=torch.device("cpu"), dtype=torch.float32)
    engine.record_experts()
    await adopt(engine, WeightsUpdate(0, weights_of_engine(noise).items()), InFlightPolicy.FINISH)
    return engine


def completions(noise: float = 0.0) -> list[Completion]:
    async def generated() -> list[Completion]:
        engine = await served(noise)
        return await asyncio.gather(*(engine.generate(request) for request in REQUESTS))

    return asyncio.run(generated())


def samples_of(generated: list[Completion]) -> list[Sample]:
    return [
        Sample(
            request.prompt_ids + completion.token_ids,
            (False,) * len(request.prompt_ids) + (True,) * len(completion.token_ids),
            completion.experts,
        )
        for request, completion in zip(REQUESTS, generated, strict=True)
    ]


def logprobs(backend: Any, samples: list[Sample]) -> Tensor:
    parts = cut(samples, PackingLimits(64, 40, Packing.SHARED_PROMPTS))
    found = torch.zeros(sum(sample.num_trained_tokens for sample in samples))
    for part, each in zip(parts, backend.logprobs(parts, Policy.CURRENT), strict=True):
        found[part.token_index_N] = each
    return found


def mismatch(backend: Any, generated: list[Completion]) -> float:
    """Mean |log(trainer / sampler)|."""
    sampler_N = torch.tensor([logprob for completion in generated for logprob in completion.sampler_logprobs])
    return (logprobs(backend, samples_of(generated)) - sampler_N).abs().mean().item()


# -------------------------------------------------------------------------------------------------------------------- engine
def test_an_engine_says_where_every_token_but_the_last_went_also_if_it_was_interrupted():
    async def in_pieces() -> list[Completion]:
        engine = await served(0.0)
        pending = [asyncio.create_task(engine.generate(request)) for request in REQUESTS]
        while not any(task.done() for task in pending):
            await asyncio.sleep(0)
        await engine.abort(*(request.request_id for request in REQUESTS))
        begun = await asyncio.gather(*pending)
        rest = [
            await engine.generate(replace(request, prefix_ids=part.token_ids)) if len(part.token_ids) < 12 else None
            for request, part in zip(REQUESTS, begun, strict=True)
        ]
        assert sum(0 < len(part.token_ids) < 12 for part in begun) > 3
        return [
            part if more is None else replace(more, experts=merge_routing(part.experts, more.experts))
            for part, more in zip(begun, rest, strict=True)
        ]

    whole = completions()
    for request, completion, pieces in zip(REQUESTS, whole, asyncio.run(in_pieces()), strict=True):
        assert completion.experts is not None
        assert completion.experts.num_tokens == len(request.prompt_ids) + 11
        assert pieces.experts == completion.experts


def test_an_engine_that_was_not_asked_says_nothing():
    async def generated() -> Completion:
        engine = TorchEngine(MIXTURE, seed=0, num_slots=7, device=torch.device("cpu"), dtype=torch.float32)
        return await engine.generate(REQUESTS[0])

    assert asyncio.run(generated()).experts is None


# ------------------------------------------------------------------------------------------------------------------- trainer
def test_with_the_engines_weights_nothing_changes(kind):
    samples = samples_of(completions())
    plain, replaying = (logprobs(new_backend(kind, experts), samples) for experts in (ExpertsConfig(), REPLAY))
    assert torch.equal(plain, replaying)


def test_samples_without_records_are_routed_as_ever(kind):
    samples = [replace(sample, experts=None) for sample in samples_of(completions())]
    plain, replaying = (logprobs(new_backend(kind, experts), samples) for experts in (ExpertsConfig(), REPLAY))
    assert torch.equal(plain, replaying)


def test_records_are_left_alone_without_replay(kind):
    generated = completions(NOISE)
    bare = [replace(sample, experts=None) for sample in samples_of(generated)]
    backend = new_backend(kind, ExpertsConfig())
    assert torch.equal(logprobs(backend, samples_of(generated)), logprobs(backend, bare))


def test_a_trainer_is_closer_to_an_engine_with_other_routers_if_it_replays_their_choices(kind):
    generated = completions(NOISE)
    without = mismatch(new_backend(kind, ExpertsConfig()), generated)
    assert mismatch(new_backend(kind, REPLAY), generated) < 0.6 * without


def test_routers_learn_by_the_experts_that_were_replayed(kind):
    backend, samples = new_backend(kind, REPLAY), samples_of(completions(NOISE))
    backend.accumulate(cut(samples, PackingLimits(64, 40, Packing.SHARED_PROMPTS)), cross_entropy)
    gradients = {name: gradient for name, gradient in backend.gradients() if name.endswith("gate.weight")}
    assert len(gradients) == MIXTURE.num_layers
    assert all(gradient.abs().max() > 1e-5 for gradient in gradients.values())


def test_an_iteration_with_replay_agrees_better_with_an_engine_that_rounds(kind, tmp_path):
    found = {}
    for replays in (False, True):
        config = tiny_config(
            tmp_path / str(replays),
            model={"kind": "scratch", "max_positions": 32, "architecture": "qwen3_moe", "init_std": 0.2},
            training={"backend": kind, "experts": {"replay": replays}},
            rollout={"num_groups": 16, "group_size": 8, "max_new_tokens": 8},
        )
        found[replays] = InProcess(config, engine_dtype=torch.bfloat16).iterate()
    assert found[True]["mismatch/mean"] < 0.9 * found[False]["mismatch/mean"]
    assert found[True]["experts/replayed_share"] > 0.7
    assert "experts/replayed_share" not in found[False]
