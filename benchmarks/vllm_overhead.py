"""What vLLM loses by being one of our engines: start-up, memory and tokens/s on a CPU, plain and as a role on Ray.

    python -m benchmarks.vllm_overhead [--model FOLDER] [--sequences 64] [--new-tokens 64]

Plain vLLM is its asynchronous engine with the same arguments, asked directly, drawing with its own sampler. The role is what
a run has: an actor that gets requests in lists and streams completions back. Both decode the same number of tokens from the
same prompts, one after the other, the faster of two rounds each. Without --model it is a Qwen3 of 30 million parameters that
is built in code.
"""

import argparse
import asyncio
import random
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelConfig, PretrainedModel, ScratchModel
from roll_core.config.rollout import RolloutConfig
from roll_core.config.run import RunConfig
from roll_core.inference.requests import GenerationRequest
from roll_core.roles.bucketed import Bucketed
from roll_core.roles.engine_role import EngineRole

PROMPT_TOKENS = 16
POSITIONS = 256


@dataclass(frozen=True)
class Seen:
    start_s: float
    tokens_per_second: float
    memory_gib: float
    """Largest resident size of the process that vLLM works in."""


def prompts(sequences: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(5, 60) for _ in range(PROMPT_TOKENS)) for _ in range(sequences)]


async def fastest(generate: Callable[[], Awaitable[int]]) -> float:
    """Tokens a second of the better of two rounds, after one to warm up."""
    await generate()
    rates = []
    for _ in range(2):
        start = time.perf_counter()
        num_tokens = await generate()
        rates.append(num_tokens / (time.perf_counter() - start))
    return max(rates)


def children_gib() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20


@ray.remote(num_cpus=1)
class Plain:
    """vLLM as anybody would use it."""

    async def measure(self, model: ModelConfig, sequences: int, new_tokens: int) -> Seen:
        import torch

        from roll_core.inference.vllm_engine import VllmEngine

        began = time.perf_counter()
        config = VllmInference()
        cpu = torch.device("cpu")
        engine = VllmEngine(model, config, num_slots=sequences, device=cpu, dtype=torch.float32, num_threads=1)
        started = time.perf_counter() - began
        llm = engine._llm

        async def generate() -> int:
            return sum(
                await asyncio.gather(*(self._one(llm, str(i), p, new_tokens) for i, p in enumerate(prompts(sequences))))
            )

        rate = await fastest(generate)
        engine.close()
        return Seen(started, rate, children_gib())

    async def _one(self, llm: Any, name: str, prompt: tuple[int, ...], new_tokens: int) -> int:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        count = 0
        async for output in llm.generate(TokensPrompt(prompt_token_ids=list(prompt)), sampling, request_id=name):
            count = len(output.outputs[0].token_ids)
        return count


async def by_role(config: RunConfig, sequences: int, new_tokens: int) -> Seen:
    role = ray.remote(EngineRole).options(num_cpus=1, max_concurrency=1000).remote(config)
    began = time.perf_counter()
    await role.start.remote()
    started = time.perf_counter() - began
    await role.adopt.remote(_weights(config))
    asked = [GenerationRequest(str(i), p, new_tokens, 1.0, (), seed=i) for i, p in enumerate(prompts(sequences))]

    async def generate() -> int:
        count = 0
        async for together in role.generate.options(num_returns="streaming").remote(asked):
            count += sum(len(completion.token_ids) for completion in await together)
        return count

    rate = await fastest(generate)
    memory = await role.__ray_call__.remote(_close_engine)
    ray.kill(role)
    return Seen(started, rate, memory)


def _close_engine(role: EngineRole) -> float:
    role._engine.close()
    return children_gib()


def _weights(config: RunConfig) -> Bucketed:
    from roll_core.models.causal_lm import build_model
    from roll_core.models.checkpoint_names import as_checkpoint
    from roll_core.weights.buckets import pack
    from roll_core.weights.checks import Watch

    watch = Watch(1)
    buckets = tuple(ray.put(b) for b in pack(watch.over(as_checkpoint(build_model(config.model, 0).named_parameters()))))
    return Bucketed(1, buckets, ray.put(watch.check), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
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
    work = (options.sequences, options.new_tokens)
    plain: Seen = ray.get(Plain.remote().measure.remote(model, *work))
    role = asyncio.run(by_role(config, *work))
    for name, seen in (("plain vLLM", plain), ("role on Ray", role)):
        print(f"{name:12s} start {seen.start_s:5.1f} s, {seen.tokens_per_second:8,.0f} tokens/s, {seen.memory_gib:.1f} GiB")
    print(f"tokens/s through the stack: {role.tokens_per_second / plain.tokens_per_second:.2f} of plain")


if __name__ == "__main__":
    main()
