"""What vLLM loses by being one of our engines: start-up, memory and tokens/s on a CPU, plain and as a role on Ray.

    python -m benchmarks.vllm_overhead [--model FOLDER] [--sequences 64] [--new-tokens 64] [--rounds 7]

Plain vLLM is its asynchronous engine with the same arguments, asked directly in its process, drawing with its own sampler:
with the logprob of every token, as training needs it, and without. The role is what a run has: an actor that gets requests
in lists and streams completions back. Both live at the same time and take turns, round by round, each decoding the same
number of tokens from the same prompts; medians. Without --model it is a Qwen3 of 30 million parameters, built in code.
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


@dataclass
class Seen:
    name: str
    start_s: float
    """From the wish for an actor until it can take weights."""
    tokens_per_second: list[float] = field(default_factory=list)
    memory_gib: float = 0.0
    """Largest resident sizes of the actor's process and vLLM's."""

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


def prompts(sequences: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(5, 60) for _ in range(PROMPT_TOKENS)) for _ in range(sequences)]


def largest_gib() -> float:
    """Of this process and those that it started and that have ended."""
    return sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20


class Plain:
    """vLLM as anybody would use it."""

    async def start(self, model: ModelConfig, sequences: int) -> None:
        import torch

        from roll_core.inference.vllm.engine import VllmEngine

        config, cpu = VllmInference(), torch.device("cpu")
        self._engine = VllmEngine(model, config, num_slots=sequences, device=cpu, dtype=torch.float32, num_threads=1)

    async def tokens_per_second(self, sequences: int, new_tokens: int, logprobs: int | None) -> float:
        began = time.perf_counter()
        asked = (self._one(str(i), p, new_tokens, logprobs) for i, p in enumerate(prompts(sequences)))
        return sum(await asyncio.gather(*asked)) / (time.perf_counter() - began)

    async def _one(self, name: str, prompt: tuple[int, ...], new_tokens: int, logprobs: int | None) -> int:
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
        answers = self._engine._llm.generate(TokensPrompt(prompt_token_ids=list(prompt)), sampling, request_id=name)
        async for output in answers:
            count = len(output.outputs[0].token_ids)
        return count


async def by_role(role: Any, sequences: int, new_tokens: int) -> float:
    asked = [GenerationRequest(str(i), p, new_tokens, 1.0, (), seed=i) for i, p in enumerate(prompts(sequences))]
    began, count = time.perf_counter(), 0
    async for together in role.generate.options(num_returns="streaming").remote(asked):
        count += sum(len(completion.token_ids) for completion in await together)
    return count / (time.perf_counter() - began)


def _close_engine(actor: Any) -> float:
    actor._engine.close()
    return largest_gib()


def _weights(config: RunConfig) -> RayWeights:
    from roll_core.models.causal_lm import build_model
    from roll_core.models.checkpoint_names import to_checkpoint_names
    from roll_core.weights.buckets import pack
    from roll_core.weights.checks import CheckRecorder

    recorder = CheckRecorder(1)
    buckets = tuple(
        ray.put(b) for b in pack(recorder.observe(to_checkpoint_names(build_model(config.model, 0).named_parameters())))
    )
    return RayWeights(1, buckets, ray.put(recorder.check), "")


async def measure(config: RunConfig, sequences: int, new_tokens: int, rounds: int) -> list[Seen]:
    began = time.perf_counter()
    plain = ray.remote(Plain).options(num_cpus=1).remote()
    await plain.start.remote(config.model, sequences)
    middle = time.perf_counter()
    role = ray.remote(EngineRole).options(num_cpus=1, max_concurrency=1000).remote(config)
    await role.start.remote()
    started_s = (middle - began, time.perf_counter() - middle)
    await role.adopt.remote(_weights(config))
    bare, alike, ours = (
        Seen("plain vLLM, no logprobs", started_s[0]),
        Seen("plain vLLM", started_s[0]),
        Seen("role on Ray", started_s[1]),
    )
    for number in range(rounds + 1):
        rates = (
            await plain.tokens_per_second.remote(sequences, new_tokens, None),
            await plain.tokens_per_second.remote(sequences, new_tokens, 0),
            await by_role(role, sequences, new_tokens),
        )
        if number > 0:  # the first warms up
            for seen, rate in zip((bare, alike, ours), rates, strict=True):
                seen.tokens_per_second.append(rate)
    bare.memory_gib = alike.memory_gib = await plain.__ray_call__.remote(_close_engine)
    ours.memory_gib = await role.__ray_call__.remote(_close_engine)
    return [bare, alike, ours]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
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
    found = asyncio.run(measure(config, options.sequences, options.new_tokens, options.rounds))
    for seen in found:
        least, most = min(seen.tokens_per_second), max(seen.tokens_per_second)
        print(f"{seen.name:24s} start {seen.start_s:5.1f} s, {seen.memory_gib:.1f} GiB, ", end="")
        print(f"{seen.median:7,.0f} tokens/s ({least:,.0f} to {most:,.0f})")
    bare, alike, ours = found
    print(f"tokens/s through the stack: {ours.median / alike.median:.2f} of plain, ", end="")
    print(f"{ours.median / bare.median:.2f} of plain without logprobs")


if __name__ == "__main__":
    main()
