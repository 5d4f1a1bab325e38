"""How far trainer and engine are apart about the same tokens of a mixture, with and without routing replay.

    python benchmarks/routing_replay.py [--experts 32] [--layers 4] [--completions 128]

A mixture from scratch; its engine holds the trainer's weights in bfloat16, or in float32 with routers that are a little off
(noise of a hundredth and a tenth of their standard deviation). Printed: mean and largest |log(trainer / sampler)|.
"""

import argparse
import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_core.batching.micro_batch import GlobalCounts, build_micro_batches
from roll_core.batching.packing import PackingLimits
from roll_core.batching.token_data import blank_token_data
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.rollout import InFlightPolicy
from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.training import Packing, TrainingConfig
from roll_core.inference.base import WeightsUpdate, adopt
from roll_core.inference.requests import GenerationRequest
from roll_core.inference.torch_engine import TorchEngine
from roll_core.models.causal_lm import build_model
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.training.base import Policy
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.sample import Sample

CPU, PROMPT, NEW_TOKENS, NO_STOP = torch.device("cpu"), (5, 6, 7, 8), 24, (-1,)


@dataclass(frozen=True)
class Sampler:
    """An engine that is not quite the trainer."""

    name: str
    dtype: torch.dtype
    noise: float
    """Of routers, in standard deviations of their weights."""


SAMPLERS = (
    Sampler("float32", torch.float32, 0.0),
    Sampler("bfloat16", torch.bfloat16, 0.0),
    Sampler("routers off by a hundredth", torch.float32, 0.01),
    Sampler("routers off by a tenth", torch.float32, 0.1),
)


async def sampled(model: ScratchModel, sampler: Sampler, count: int) -> tuple[list[Sample], Tensor]:
    """Samples with the experts that the engine recorded, and its logprobs."""
    engine = TorchEngine(model, seed=0, num_slots=64, device=CPU, dtype=sampler.dtype)
    engine.record_experts()
    generator, weights = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, parameter in to_checkpoint_names((n, p.detach()) for n, p in build_model(model, 0).named_parameters()):
        noise = sampler.noise * model.init_std if name.endswith("mlp.gate.weight") else 0.0
        weights[name] = parameter + noise * torch.randn(parameter.shape, generator=generator)
    await adopt(engine, WeightsUpdate(0, weights.items()), InFlightPolicy.FINISH)
    requests = [GenerationRequest(str(i), PROMPT, NEW_TOKENS, 1.0, NO_STOP, seed=i) for i in range(count)]
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    trained = (False,) * len(PROMPT) + (True,) * NEW_TOKENS
    samples = [Sample(PROMPT + each.token_ids, trained, each.experts) for each in completions]
    return samples, torch.tensor([logprob for each in completions for logprob in each.sampler_logprobs])


def scored(model: ScratchModel, samples: list[Sample], experts: ExpertsConfig) -> Tensor:
    """The trainer's logprobs, in the order of the samples."""
    backend = TorchBackend(model, TorchSettings(TrainingConfig(experts=experts), 0, 1.0, CPU))
    num_tokens = len(samples) * NEW_TOKENS
    parts = build_micro_batches(
        samples,
        blank_token_data(num_tokens),
        chosen=range(len(samples)),
        counts=GlobalCounts(num_tokens, len(samples)),
        rank=0,
        num_ranks=1,
        limits=PackingLimits(4096, None, Packing.NONE),
    )
    found = torch.zeros(num_tokens)
    for part, logprobs_N in zip(parts, backend.logprobs(parts, Policy.CURRENT), strict=True):
        found[part.token_index_N] = logprobs_N
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--completions", type=int, default=128)
    asked = parser.parse_args()
    model = ScratchModel(
        architecture=Architecture.QWEN3_MOE,
        num_experts=asked.experts,
        num_layers=asked.layers,
        experts_per_token=4,
        max_positions=32,
        init_std=0.2,
    )
    print(f"{asked.completions} completions of {NEW_TOKENS} tokens, {asked.layers} layers, 4 of {asked.experts} experts")
    for sampler in SAMPLERS:
        samples, sampler_N = asyncio.run(sampled(model, sampler, asked.completions))
        for label, experts in (("as ever", ExpertsConfig()), ("with replay", ExpertsConfig(replay=True))):
            apart_N = (scored(model, samples, experts) - sampler_N).abs()
            print(f"{sampler.name}, {label}: mean {apart_N.mean():.2g}, largest {apart_N.max():.2g}")


if __name__ == "__main__":
    main()
