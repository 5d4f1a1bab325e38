"""Tokens per second of the torch engine and the torch backend on one GPU, for a model of about half a billion parameters.

    python benchmarks/gpu_parts.py [--sequences 512] [--new-tokens 256]

Needs a GPU and neither Ray nor Prefect. Prints decode tokens/s (all slots busy), update tokens/s, peak memory, how long a
checkpoint's copy blocks the trainer, and what the output layer of a real vocabulary costs, fused and plain.
"""

import argparse
import asyncio
import random
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor

from roll_core.algorithms.catalog import build_algorithm
from roll_core.batching.micro_batch import GlobalCounts, build_micro_batches
from roll_core.batching.packing import PackingLimits
from roll_core.batching.token_data import TokenData
from roll_core.config.algorithm import Grpo
from roll_core.config.model import ScratchModel
from roll_core.config.training import OptimizerConfig, Packing, Precision, TrainingConfig
from roll_core.inference.requests import GenerationRequest
from roll_core.inference.torch_engine import TorchEngine
from roll_core.training.scorer import ScoreTokens
from roll_core.training.torch_backend import TorchBackend
from roll_core.training.torch_trained import TorchSettings
from roll_core.types.sample import Sample

GPU = torch.device("cuda")
PROMPT_TOKENS = 64

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def half_a_billion(max_positions: int) -> ScratchModel:
    """The shape of Qwen3-0.6B, with a character vocabulary."""
    return ScratchModel(
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        max_positions=max_positions,
        init_std=0.02,
    )


async def decode(model: ScratchModel, sequences: int, new_tokens: int) -> float:
    engine = TorchEngine(model, seed=0, num_slots=sequences, device=GPU, dtype=torch.bfloat16)
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(2, 60) for _ in range(PROMPT_TOKENS)) for _ in range(sequences // 8)]
    asked = [GenerationRequest(str(i), prompts[i // 8], new_tokens, 1.0, (), seed=i) for i in range(sequences)]
    await asyncio.gather(*(engine.generate(request) for request in asked[: sequences // 8]))
    start = time.perf_counter()
    await asyncio.gather(*(engine.generate(request) for request in asked))
    return sequences * new_tokens / (time.perf_counter() - start)


def update(model: ScratchModel, sequences: int, new_tokens: int) -> float:
    training = TrainingConfig(precision=Precision.BFLOAT16, activation_checkpointing=True)
    backend = TorchBackend(model, TorchSettings(training, seed=0, temperature=1.0, device=GPU))
    backend.start_optimizer(OptimizerConfig(), total_steps=10)
    rng = random.Random(0)
    samples = [_sample(rng, new_tokens) for _ in range(sequences)]
    tokens, counts = _tokens(sequences, new_tokens), GlobalCounts(sequences * new_tokens, sequences)
    limits = PackingLimits(65536, None, Packing.ROWS)
    loss = build_algorithm(Grpo(), num_optimizer_steps=1, max_new_tokens=new_tokens).loss
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for micro_batch in build_micro_batches(
            samples, tokens, chosen=range(sequences), counts=counts, rank=0, num_ranks=1, limits=limits
        ):
            backend.accumulate(micro_batch, loss)
        backend.apply_gradients()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sum(s.num_tokens for s in samples) / min(seconds)


def _sample(rng: random.Random, new_tokens: int) -> Sample:
    return Sample(
        token_ids=tuple(rng.randrange(2, 60) for _ in range(PROMPT_TOKENS + new_tokens)),
        trained=(False,) * PROMPT_TOKENS + (True,) * new_tokens,
    )


def _tokens(sequences: int, new_tokens: int) -> TokenData:
    count = sequences * new_tokens
    turn_N = torch.arange(sequences).repeat_interleave(new_tokens)
    return TokenData(
        sampler_logprobs_N=torch.full((count,), -4.0),
        turn_N=turn_N,
        advantages_N=torch.randn(sequences)[turn_N],
        weights_N=torch.ones(count),
        is_fresh_N=torch.ones(count, dtype=torch.bool),
    )


def snapshots(model: ScratchModel) -> None:
    """Weights and Adam's moments copied to the host, which blocks the trainer, and written to disk, which does not."""
    backend = TorchBackend(model, TorchSettings(TrainingConfig(), seed=0, temperature=1.0, device=GPU))
    backend.start_optimizer(OptimizerConfig(), total_steps=10)
    for name in ("the first time", "again"):
        with tempfile.TemporaryDirectory() as folder:
            torch.cuda.synchronize()
            times = [time.perf_counter()]
            snapshot = backend.snapshot()
            times.append(time.perf_counter())
            size = sum(file.stat().st_size for file in snapshot(Path(folder) / "checkpoint")) / 1e9
            blocked, written = times[1] - times[0], time.perf_counter() - times[1]
        print(f"checkpoint of {size:.1f} GB, {name}: blocked {blocked:.2f} s ({size / blocked:.0f} GB/s), ", end="")
        print(f"then written to disk in {written:.1f} s")


def score_tokens(num_tokens: int, hidden: int = 1024, vocabulary: int = 151_936, chunk_tokens: int = 1024) -> None:
    """The output layer of a real vocabulary, forward and backward: fused, and as plain logits."""
    hidden_NH = torch.randn(num_tokens, hidden, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    output_VH = (0.02 * torch.randn(vocabulary, hidden, device=GPU)).to(torch.bfloat16).requires_grad_()
    targets_N = torch.randint(vocabulary, (num_tokens,), device=GPU)

    def fused() -> tuple[Tensor, Tensor]:
        logprobs_N, entropies_N, _ = ScoreTokens.apply(hidden_NH, output_VH, targets_N, None, None, 1.0, chunk_tokens)
        return logprobs_N, entropies_N

    def plain() -> tuple[Tensor, Tensor]:
        logprobs_NV = (hidden_NH @ output_VH.T).float().log_softmax(-1)
        return logprobs_NV.gather(1, targets_N[:, None]), -(logprobs_NV.exp() * logprobs_NV).sum(-1)

    for name, score in (("fused", fused), ("plain", plain)):
        seconds = []
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            start = time.perf_counter()
            logprobs_N, entropies_N = score()
            (logprobs_N.mean() + 0.01 * entropies_N.mean()).backward()
            hidden_NH.grad = output_VH.grad = None
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        print(f"scoring {num_tokens} tokens of {vocabulary}, {name}: {min(seconds) * 1e3:.0f} ms, {peak:.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    options = parser.parse_args()
    model = half_a_billion(PROMPT_TOKENS + options.new_tokens)
    print(torch.cuda.get_device_name(), f"{options.sequences} sequences of {PROMPT_TOKENS} + {options.new_tokens} tokens")
    print(f"decode {asyncio.run(decode(model, options.sequences, options.new_tokens)):,.0f} tokens/s")
    torch.cuda.reset_peak_memory_stats()
    print(f"update {update(model, options.sequences, options.new_tokens):,.0f} tokens/s")
    print(f"peak memory of the update {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    snapshots(model)
    score_tokens(16_384)


if __name__ == "__main__":
    main()
