"""Overhead of vLLM as an engine role on Ray against plain vLLM on a CPU: start-up, memory, tokens/s.

    python -m benchmarks.vllm_overhead [--model FOLDER] [--sequences 64] [--new-tokens 64] [--rounds 7]

Needs a CPU and vLLM (`make setup-vllm`). Plain vLLM is its asynchronous engine with the same arguments, called in its own
process, with its own sampler: with the logprob of every token, as training needs it, and without. The role is the Ray actor
of a run: it gets requests in lists and streams completions back. Both are up at the same time and take turns, round by
round, each decoding the same number of tokens from the same prompts. Prints medians. Without --model the model is a Qwen3
of 30 million parameters with random weights.
"""

import argparse
import asyncio
import random
import resource
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelConfig, PretrainedModel, ScratchModel
from roll_core.config.rollout import RolloutConfig
from roll_core.config.run import RunConfig
from roll_core.inference.requests import GenerationRequest
from roll_core.roles.engine_role import EngineRole
from roll_core.roles.ray_weights import RayWeights

PROMPT_TOKENS = 16
POSITIONS = 256
STORE_URI = "memory://vllm-overhead"
"""Store of the role. Weights come through Ray's object store here, so that it stays empty."""


@dataclass
class Measured:
    """Numbers of one way to use vLLM."""

    name: str
    start_s: float
    """Seconds from the creation of the actor until it can load weights."""
    tokens_per_second: list[float] = field(default_factory=list)
    memory_gib: float = 0.0
    """Peak resident memory of the actor's process and vLLM's, summed, in GiB."""

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


def random_prompts(sequences: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(5, 60) for _ in range(PROMPT_TOKENS)) for _ in range(sequences)]


def peak_gib() -> float:
    """Peak resident memory in GiB of this process, plus that of the largest child process that has ended."""
    return sum(resource.getrusage(of).ru_maxrss for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20


class PlainVllm:
    """Ray actor with vLLM, called directly in the actor's process."""

    async def start(self, model: ModelConfig, sequences: int) -> None:
        import torch

        from roll_core.inference.vllm.engine import VllmEngine

        config, cpu = VllmInference(), torch.device("cpu")
        self._engine = VllmEngine(model, config, num_slots=sequences, device=cpu, dtype=torch.float32, num_threads=1)

    async def tokens_per_second(self, sequences: int, new_tokens: int, logprobs: int | None) -> float:
        began = time.perf_counter()
        calls = (self._generate(str(i), p, new_tokens, logprobs) for i, p in enumerate(random_prompts(sequences)))
        return sum(await asyncio.gather(*calls)) / (time.perf_counter() - began)

    async def _generate(self, name: str, prompt: tuple[int, ...], new_tokens: int, logprobs: int | None) -> int:
        """Generate one completion; return its number of tokens."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        count = 0
        outputs = self._engine._llm.generate(TokensPrompt(prompt_token_ids=list(prompt)), sampling, request_id=name)
        async for output in outputs:
            count = len(output.outputs[0].token_ids)
        return count


async def role_tokens_per_second(role: Any, sequences: int, new_tokens: int) -> float:
    prompts = random_prompts(sequences)
    requests = [GenerationRequest(str(i), p, new_tokens, 1.0, (), seed=i) for i, p in enumerate(prompts)]
    began, count = time.perf_counter(), 0
    async for completions in role.generate.options(num_returns="streaming").remote(requests):
        count += sum(len(completion.token_ids) for completion in await completions)
    return count / (time.perf_counter() - began)


def _close_engine(actor: Any) -> float:
    """Close the engine of an actor, in that actor; return its peak memory in GiB."""
    actor._engine.close()
    return peak_gib()


def _model_weights(config: RunConfig) -> RayWeights:
    """Put the weights of the model, as version 1, into Ray's object store."""
    from roll_core.models.causal_lm import build_model
    from roll_core.models.checkpoint_names import to_checkpoint_names
    from roll_core.weights.buckets import pack
    from roll_core.weights.checks import CheckRecorder

    recorder = CheckRecorder(1)
    buckets = tuple(
        ray.put(b) for b in pack(recorder.observe(to_checkpoint_names(build_model(config.model, 0).named_parameters())))
    )
    return RayWeights(1, buckets, ray.put(recorder.check), "")


async def measure(config: RunConfig, sequences: int, new_tokens: int, rounds: int) -> list[Measured]:
    """Start both actors, let them take turns, and return plain vLLM without logprobs, plain vLLM, and the role."""
    began = time.perf_counter()
    plain_actor = ray.remote(PlainVllm).options(num_cpus=1).remote()
    await plain_actor.start.remote(config.model, sequences)
    middle = time.perf_counter()
    role_actor = ray.remote(EngineRole).options(num_cpus=1, max_concurrency=1000).remote(config, STORE_URI)
    await role_actor.start.remote()
    started_s = (middle - began, time.perf_counter() - middle)
    await role_actor.adopt.remote(_model_weights(config))
    without_logprobs, plain, role = (
        Measured("plain vLLM, no logprobs", started_s[0]),
        Measured("plain vLLM", started_s[0]),
        Measured("role on Ray", started_s[1]),
    )
    for number in range(rounds + 1):
        rates = (
            await plain_actor.tokens_per_second.remote(sequences, new_tokens, None),
            await plain_actor.tokens_per_second.remote(sequences, new_tokens, 0),
            await role_tokens_per_second(role_actor, sequences, new_tokens),
        )
        if number > 0:  # the first round is a warm-up
            for measured, rate in zip((without_logprobs, plain, role), rates, strict=True):
                measured.tokens_per_second.append(rate)
    without_logprobs.memory_gib = plain.memory_gib = await plain_actor.__ray_call__.remote(_close_engine)
    role.memory_gib = await role_actor.__ray_call__.remote(_close_engine)
    return [without_logprobs, plain, role]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: 30 million random parameters")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model: ModelConfig
    if options.model is None:
        model = ScratchModel(
            hidden_size=512, intermediate_size=1536, num_layers=8, num_heads=8, num_kv_heads=4, max_positions=POSITIONS
        )
    else:
        model = PretrainedModel(path=str(options.model.resolve()), max_positions=POSITIONS)
    config = RunConfig(
        name="overhead",
        iterations=1,
        model=model,
        inference=VllmInference(),
        rollout=RolloutConfig(slots_per_engine=options.sequences),
    )
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    rows = asyncio.run(measure(config, options.sequences, options.new_tokens, options.rounds))
    for row in rows:
        least, most = min(row.tokens_per_second), max(row.tokens_per_second)
        print(f"{row.name:24s} start {row.start_s:5.1f} s, {row.memory_gib:.1f} GiB, ", end="")
        print(f"{row.median:7,.0f} tokens/s ({least:,.0f} to {most:,.0f})")
    without_logprobs, plain, role = rows
    print(f"tokens/s of the role: {role.median / plain.median:.2f} of plain vLLM, ", end="")
    print(f"{role.median / without_logprobs.median:.2f} of plain vLLM without logprobs")


if __name__ == "__main__":
    main()
