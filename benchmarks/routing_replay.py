"""Mismatch between trainer and engine for tokens of a mixture of experts, with and without routing replay.

    python -m benchmarks.routing_replay [--experts 32] [--layers 4] [--completions 128]

Needs a CPU only. The mixture is built from scratch. Its engine has the trainer's weights in float32, in bfloat16, or in
float32 with noise on the routers (a hundredth and a tenth of their standard deviation). Prints mean and largest
|log(trainer / sampler)|.
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
class EngineVariant:
    """Engine whose weights differ a little from the trainer's."""

    name: str
    dtype: torch.dtype
    router_noise: float
    """Noise on router weights, in standard deviations of these weights."""


ENGINES = (
    EngineVariant("float32", torch.float32, 0.0),
    EngineVariant("bfloat16", torch.bfloat16, 0.0),
    EngineVariant("router noise 0.01", torch.float32, 0.01),
    EngineVariant("router noise 0.1", torch.float32, 0.1),
)


async def generate(model: ScratchModel, variant: EngineVariant, count: int) -> tuple[list[Sample], Tensor]:
    """Generate `count` completions. Return samples with the experts that the engine recorded, and sampler logprobs."""
    engine = TorchEngine(model, seed=0, num_slots=64, device=CPU, dtype=variant.dtype)
    engine.record_experts()
    generator, weights = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, parameter in to_checkpoint_names((n, p.detach()) for n, p in build_model(model, 0).named_parameters()):
        noise = variant.router_noise * model.init_std if name.endswith("mlp.gate.weight") else 0.0
        weights[name] = parameter + noise * torch.randn(parameter.shape, generator=generator)
    await adopt(engine, WeightsUpdate(0, weights.items()), InFlightPolicy.FINISH)
    requests = [GenerationRequest(str(i), PROMPT, NEW_TOKENS, 1.0, NO_STOP, seed=i) for i in range(count)]
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    trained = (False,) * len(PROMPT) + (True,) * NEW_TOKENS
    samples = [Sample(PROMPT + each.token_ids, trained, each.experts) for each in completions]
    return samples, torch.tensor([logprob for each in completions for logprob in each.sampler_logprobs])


def trainer_logprobs(model: ScratchModel, samples: list[Sample], experts: ExpertsConfig) -> Tensor:
    """Logprobs of all trained tokens by the trainer, in the order of the samples."""
    backend = TorchBackend(model, TorchSettings(TrainingConfig(experts=experts), 0, 1.0, CPU))
    num_tokens = len(samples) * NEW_TOKENS
    micro_batches = build_micro_batches(
        samples,
        blank_token_data(num_tokens),
        chosen=range(len(samples)),
        counts=GlobalCounts(num_tokens, len(samples)),
        rank=0,
        num_ranks=1,
        limits=PackingLimits(4096, None, Packing.NONE),
    )
    all_logprobs_N = torch.zeros(num_tokens)
    for micro_batch, logprobs_N in zip(micro_batches, backend.logprobs(micro_batches, Policy.CURRENT), strict=True):
        all_logprobs_N[micro_batch.token_index_N] = logprobs_N
    return all_logprobs_N


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--completions", type=int, default=128)
    options = parser.parse_args()
    model = ScratchModel(
        architecture=Architecture.QWEN3_MOE,
        num_experts=options.experts,
        num_layers=options.layers,
        experts_per_token=4,
        max_positions=32,
        init_std=0.2,
    )
    print(
        f"{options.completions} completions of {NEW_TOKENS} tokens, {options.layers} layers, 4 of {options.experts} experts"
    )
    for variant in ENGINES:
        samples, sampler_logprobs_N = asyncio.run(generate(model, variant, options.completions))
        for label, experts in (("without replay", ExpertsConfig()), ("with replay", ExpertsConfig(replay=True))):
            mismatch_N = (trainer_logprobs(model, samples, experts) - sampler_logprobs_N).abs()
            print(f"{variant.name}, {label}: mean {mismatch_N.mean():.2g}, largest {mismatch_N.max():.2g}")


if __name__ == "__main__":
    main()
