"""Speed and memory of the engines, the torch backend and weight transfer on one GPU, for the shape of a Qwen3 model.

    python -m benchmarks.gpu_parts [--shape 0.6b|1.7b|4b] [--parts engine,update,...] [--sequences 512] [--new-tokens 256]

Needs one GPU and vLLM; neither Ray nor Prefect runs. Prints, by part:

    engine     start of vLLM, weight transfer through GPU memory against a plain copy, decode tokens/s with all slots busy,
               and the seconds of sleep, wake and offload when trainer and engine share the GPU
    update     tokens/s, MFU and peak memory of an optimizer step, plain, compiled, and with activation checkpointing
    torch      decode tokens/s of the torch engine
    snapshots  seconds that the snapshot of a checkpoint blocks the trainer, and seconds to write it
    scoring    milliseconds and memory of the output layer of a 151,936-token vocabulary, fused and plain

MFU is the share of the GPU's arithmetic (989 TFLOP/s, dense bfloat16) that goes into 6 operations per parameter and token,
and into attention.
"""

import argparse
import asyncio
import random
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from roll_core.algorithms.catalog import build_algorithm
from roll_core.batching.micro_batch import GlobalCounts, build_micro_batches
from roll_core.batching.packing import PackingLimits
from roll_core.batching.token_data import TokenData
from roll_core.config.algorithm.methods import Grpo
from roll_core.config.inference import VllmInference
from roll_core.config.model import ScratchModel
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.problems import ArithmeticProblems
from roll_core.config.rewards import ExactMatch
from roll_core.config.rollout import InFlightPolicy
from roll_core.config.run import RunConfig
from roll_core.config.training.training import Packing, Precision, TrainingConfig
from roll_core.inference.base import InferenceEngine
from roll_core.inference.requests import GenerationRequest
from roll_core.inference.torch_engine import TorchEngine
from roll_core.inference.vllm import engine as vllm_engine
from roll_core.inference.vllm.engine import VllmEngine
from roll_core.planning.memory import trainer_memory
from roll_core.planning.model_shape import shape_of
from roll_core.training.scorer import WHOLE, ScoreTokens
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.sample import Sample
from roll_core.weights.buckets import DeviceBucket, share_in_place
from roll_core.weights.checks import WeightsCheck, check_in_place
from roll_core.weights.digests import WeightsDigest

GPU = torch.device("cuda")
PROMPT_TOKENS = 64

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8},
    "4b": {"hidden_size": 3072, "intermediate_size": 9216, "num_layers": 32, "num_heads": 24, "num_kv_heads": 8},
}
"""Shapes close to those of Qwen3 models, with 64 or 128 features per head, and a character vocabulary."""
PEAK_FLOPS = 989e12
"""Operations per second of H100 and H200 in dense bfloat16, as NVIDIA states them."""


def scratch_model(name: str, max_positions: int) -> ScratchModel:
    return ScratchModel(**SHAPES[name], max_positions=max_positions, init_std=0.02)


async def decode_rate(engine: InferenceEngine, sequences: int, new_tokens: int) -> float:
    """Tokens per second that an engine generates with all slots busy, after a warm-up; eight sequences share a prompt."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(2, 60) for _ in range(PROMPT_TOKENS)) for _ in range(sequences // 8)]
    requests = [GenerationRequest(str(i), prompts[i // 8], new_tokens, 1.0, (), seed=i) for i in range(sequences)]
    await asyncio.gather(*(engine.generate(request) for request in requests[: sequences // 8]))
    start = time.perf_counter()
    await asyncio.gather(*(engine.generate(request) for request in requests))
    return sequences * new_tokens / (time.perf_counter() - start)


async def measure_torch_engine(model: ScratchModel, sequences: int, new_tokens: int) -> None:
    """Print the decode rate of the torch engine."""
    engine = TorchEngine(model, seed=0, num_slots=sequences, device=GPU, dtype=torch.bfloat16)
    print(f"decode, torch engine: {await decode_rate(engine, sequences, new_tokens):,.0f} tokens/s")


async def measure_vllm(model: ScratchModel, sequences: int, new_tokens: int) -> None:
    """Start vLLM beside a trainer, publish weights several times through GPU memory, decode, and take turns on the GPU."""
    bandwidth = copy_bandwidth()
    print(f"copy within the GPU: {bandwidth / 1e9:,.0f} GB/s")
    vllm_engine.WORKER = "benchmarks.timed_worker.TimedWorker"
    backend = TorchBackend(model, TorchSettings(TrainingConfig(), seed=0, temperature=1.0, device=GPU))
    backend.start_optimizer(OptimizerConfig(), total_steps=10)
    backend.snapshot()  # allocates Adam's moments
    start = time.perf_counter()
    config = VllmInference(memory_share=0.4)
    engine = VllmEngine(model, config, num_slots=sequences, device=GPU, dtype=torch.bfloat16, num_threads=8)
    print(f"vLLM started in {time.perf_counter() - start:.0f} s")
    for version in range(6):
        await publish(engine, backend, version, bandwidth, digest_after=version >= 4)
    print(f"decode, vLLM: {await decode_rate(engine, sequences, new_tokens):,.0f} tokens/s")
    await engine.sleep()
    for _ in range(2):  # the second time all host buffers are allocated
        await take_turns(engine, backend, bandwidth)
    engine.close()


async def take_turns(engine: VllmEngine, backend: TorchBackend, bandwidth: float) -> None:
    """Print seconds of each step of an iteration in which trainer and engine each need the whole GPU (training.offload)."""

    async def timed(name: str, act: Awaitable[None]) -> None:
        start = time.perf_counter()
        await act
        print(f"{name} {time.perf_counter() - start:.2f} s", end=", ")

    await timed("taking turns on the GPU: publish to the sleeping engine", publish(engine, backend, 9, bandwidth))
    for name, act in (("offload the trainer", backend.offload), ("reload it", backend.reload)):
        await timed(name, asyncio.to_thread(act))
    await timed("wake the engine", engine.wake())
    await timed("put it to sleep", engine.sleep())
    print()


class Stopwatch:
    """Seconds of named steps, some of which overlap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the seconds that the body takes."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def __str__(self) -> str:
        return ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in self.seconds.items())


async def publish(
    engine: VllmEngine, backend: TorchBackend, version: int, bandwidth: float, digest_after: bool = False
) -> None:
    """Publish weights through GPU memory as publisher, rank and role do it, and print the milliseconds of each step.

    Ray's two round trips between them are left out. The digest of the weights is computed beside the transfer, or after it
    with `digest_after`.
    """
    steps = Stopwatch()

    def share() -> tuple[DeviceBucket, WeightsCheck]:
        weights = list(backend.weights())
        with steps.measure("share"):
            bucket = share_in_place(weights)
        with steps.measure("sample"):
            return bucket, check_in_place(version, weights)

    def compute_digest() -> None:
        digest = WeightsDigest()
        with steps.measure("digest"):
            digest.add(list(backend.weights()))
            digest.hexdigest()

    async def begin() -> None:
        with steps.measure("begin"):
            await engine.begin_update(InFlightPolicy.FINISH)

    with steps.measure("whole"):
        (bucket, check), _ = await asyncio.gather(asyncio.to_thread(share), begin())
        digesting = asyncio.sleep(0) if digest_after else asyncio.create_task(asyncio.to_thread(compute_digest))
        with steps.measure("load"):
            await engine.load(bucket)
        with steps.measure("finish"):
            await engine.finish_update(version, check)
        await digesting
    if digest_after:
        compute_digest()
    (in_worker,) = await engine._llm.collective_rpc("seconds_spent")
    transfer = in_worker["open"] + in_worker["find"] + in_worker["copy"]
    num_bytes = 2 * sum(tensor.numel() for _, tensor in backend.weights())
    order = "after the transfer" if digest_after else "beside the transfer"
    print(f"publish {version}, digest {order}: {num_bytes / 1e9:.2f} GB in bfloat16, milliseconds: {steps}")
    print(f"  load and finish inside vLLM's worker: {', '.join(f'{n} {1e3 * s:.1f}' for n, s in in_worker.items())}")
    for name, seconds in (
        ("transfer inside vLLM's worker", transfer),
        ("transfer and check", transfer + in_worker["check"]),
        ("whole" if digest_after else "whole, with the digest", steps.seconds["whole"]),
    ):
        rate = num_bytes / seconds
        print(f"  {name}: {rate / 1e9:,.0f} GB/s, {rate / bandwidth:.0%} of a copy within the GPU")


def copy_bandwidth() -> float:
    """Bytes per second of a copy within GPU memory; a byte that is read and written counts once."""
    source = torch.empty(2**31, dtype=torch.uint8, device=GPU)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 10 * len(source) / (time.perf_counter() - start)


KINDS = {
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "wgmma"),
    "attention": ("fmha", "flash", "attention"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "compiled element-wise": ("triton",),
    "copies and casts": ("memcpy", "memset", "copy", "cat"),
}
"""Substrings of kernel names by kind of kernel; the first kind that matches counts."""


def print_profile(step: Callable[[], None]) -> None:
    """Print the share of one optimizer step by kind of kernel, and the share in which the GPU was idle."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    seconds_by_kind: dict[str, float] = {}
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other kernels")
        seconds_by_kind[kind] = seconds_by_kind.get(kind, 0.0) + event.self_device_time_total / 1e6
    seconds_by_kind["idle"] = max(0.0, seconds - sum(seconds_by_kind.values()))
    shares = sorted(seconds_by_kind.items(), key=lambda item: -item[1])
    print("  " + ", ".join(f"{kind} {part / seconds:.0%}" for kind, part in shares))


def measure_update(model: ScratchModel, sequences: int, new_tokens: int, training: TrainingConfig) -> None:
    """Print tokens/s, MFU and peak memory, measured and planned, of an optimizer step; the best of four steps."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    backend = TorchBackend(model, TorchSettings(training, seed=0, temperature=1.0, device=GPU))
    backend.start_optimizer(OptimizerConfig(), total_steps=10)
    rng = random.Random(0)
    samples = [_sample(rng, new_tokens) for _ in range(sequences)]
    tokens, counts = _tokens(sequences, new_tokens), GlobalCounts(sequences * new_tokens, sequences)
    limits = PackingLimits(training.micro_batch_tokens, None, Packing.ROWS)
    loss = build_algorithm(Grpo(), num_optimizer_steps=1, max_new_tokens=new_tokens).loss
    micro_batches = build_micro_batches(
        samples, tokens, chosen=range(sequences), counts=counts, rank=0, num_ranks=1, limits=limits
    )

    def step() -> None:
        backend.accumulate(micro_batches, loss)
        backend.apply_gradients()

    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    rate, peak = sum(s.num_tokens for s in samples) / min(seconds), torch.cuda.max_memory_allocated() / 1e9
    mfu = rate * operations_per_token(backend, model, PROMPT_TOKENS + new_tokens) / PEAK_FLOPS
    enabled = [key for key in ("compile", "activation_checkpointing") if getattr(training, key)]
    print(
        f"update ({', '.join(enabled) or 'plain'}): {rate:,.0f} tokens/s, MFU {mfu:.0%}, first step {seconds[0]:.0f} s, ",
        end="",
    )
    config = RunConfig(
        name="parts",
        iterations=1,
        model=model,
        problems=ArithmeticProblems(),
        reward=ExactMatch(),
        training=training,
    )
    shape = shape_of(model)
    assert shape is not None
    print(f"peak {peak:.1f} GB ({trainer_memory(config, shape).peak:.1f} planned), ", end="")
    print(f"micro-batches of {training.micro_batch_tokens}")
    print_profile(step)


def operations_per_token(backend: TorchBackend, model: ScratchModel, length: int) -> float:
    """Floating-point operations of forward and backward pass per token; recomputed activations do not count twice."""
    parameters = sum(tensor.numel() for _, tensor in backend.weights())
    return 6 * parameters + 12 * model.num_layers * model.hidden_size * length / 2


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


def measure_snapshots(model: ScratchModel) -> None:
    """Print seconds of a snapshot to host memory, which blocks the trainer, and of writing it to disk, which does not."""
    backend = TorchBackend(model, TorchSettings(TrainingConfig(), seed=0, temperature=1.0, device=GPU))
    backend.start_optimizer(OptimizerConfig(), total_steps=10)
    for name in ("first snapshot", "second snapshot"):
        with tempfile.TemporaryDirectory() as folder:
            torch.cuda.synchronize()
            times = [time.perf_counter()]
            snapshot = backend.snapshot()
            times.append(time.perf_counter())
            size = sum(file.stat().st_size for file in snapshot(Path(folder) / "checkpoint")) / 1e9
            blocked, written = times[1] - times[0], time.perf_counter() - times[1]
        print(f"checkpoint of {size:.1f} GB, {name}: blocked {blocked:.2f} s ({size / blocked:.0f} GB/s), ", end="")
        print(f"then written to disk in {written:.1f} s")


def measure_scoring(num_tokens: int, hidden: int = 1024, vocabulary: int = 151_936, chunk_tokens: int = 1024) -> None:
    """Print milliseconds and peak memory of the output layer, forward and backward: fused, and with plain logits."""
    hidden_NH = torch.randn(num_tokens, hidden, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    output_VH = (0.02 * torch.randn(vocabulary, hidden, device=GPU)).to(torch.bfloat16).requires_grad_()
    targets_N = torch.randint(vocabulary, (num_tokens,), device=GPU)

    def fused() -> tuple[Tensor, Tensor]:
        logprobs_N, entropies_N, _ = ScoreTokens.apply(hidden_NH, output_VH, targets_N, None, None, 1.0, chunk_tokens, WHOLE)
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
        size = f"{num_tokens} tokens, vocabulary of {vocabulary}"
        print(f"scoring {size}, {name}: {min(seconds) * 1e3:.0f} ms, {peak:.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--parts", default="engine,update,torch,snapshots,scoring")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    options = parser.parse_args()
    model, work = scratch_model(options.shape, PROMPT_TOKENS + options.new_tokens), (options.sequences, options.new_tokens)
    print(f"{torch.cuda.get_device_name()}, {options.shape}, {work[0]} sequences of {PROMPT_TOKENS} + {work[1]} tokens")
    parts = options.parts.split(",")
    if "engine" in parts:
        asyncio.run(measure_vllm(model, *work))
    if "update" in parts:
        for compiled, checkpointing in ((False, False), (True, False), (True, True)):
            training = TrainingConfig(
                precision=Precision.BFLOAT16,
                compile=compiled,
                activation_checkpointing=checkpointing,
                micro_batch_tokens=options.micro_batch_tokens,
            )
            measure_update(model, *work, training)
    if "torch" in parts:
        asyncio.run(measure_torch_engine(model, *work))
    if "snapshots" in parts:
        measure_snapshots(model)
    if "scoring" in parts:
        measure_scoring(16_384)


if __name__ == "__main__":
    main()
