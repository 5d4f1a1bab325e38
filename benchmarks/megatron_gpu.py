"""Speed and memory of updates by the megatron backend on one GPU, in bfloat16.

    python -m benchmarks.megatron_gpu [--shape dense-1.7b|mixture-4b|...] [--seconds 60] [--recompute] [--plan-only]

Needs one GPU and megatron-core; without a GPU only the tiny shapes and --plan-only make sense. Weights are drawn on the
device, so that no model is read or downloaded. Prints tokens/s, MFU, peak memory as measured and as planned, and the kernels
that take most of a step. MFU is the share of the GPU's arithmetic (989 TFLOP/s, dense bfloat16) that goes into 6 operations
per token and active parameter, and into attention; recomputed activations do not count twice.
"""

import argparse
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from roll_core.algorithms.catalog import build_algorithm
from roll_core.batching.micro_batch import GlobalCounts, MicroBatch, build_micro_batches
from roll_core.batching.packing import PackingLimits
from roll_core.batching.token_data import TokenData
from roll_core.config.algorithm.methods import Grpo
from roll_core.config.model import PretrainedModel
from roll_core.config.operations.placement import ClusterConfig, DeviceKind
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.run import RunConfig
from roll_core.config.training.training import BackendKind, Packing, Precision, TrainingConfig
from roll_core.planning.memory import TrainerMemory, trainer_memory
from roll_core.planning.model_shape import shape_of
from roll_core.training.megatron.backend import InitialWeights, MegatronBackend, MegatronSettings
from roll_core.types.sample import Sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PEAK_FLOPS = 989e12
"""Operations per second of H100 and H200 in dense bfloat16, as NVIDIA states them."""
PROMPT_TOKENS = 64

warnings.filterwarnings("ignore")


def model_config(name: str, length: int) -> PretrainedConfig:
    """Hugging Face config of a shape, for sequences of at most `length` tokens."""
    match name:
        case "dense-1.7b":  # Qwen3-1.7B
            sizes = _sizes(hidden=2048, inside=6144, layers=28, heads=(16, 8, 128), vocabulary=151_936, length=length)
            return Qwen3Config(**sizes, tie_word_embeddings=True)
        case "mixture-4b":  # Qwen3-30B-A3B with half of its experts and a quarter of its layers
            sizes = _sizes(hidden=2048, inside=6144, layers=12, heads=(32, 4, 128), vocabulary=151_936, length=length)
            return Qwen3MoeConfig(**sizes, **_experts(64, 8, 768))
        case "tiny":
            sizes = _sizes(hidden=64, inside=96, layers=2, heads=(4, 2, 16), vocabulary=256, length=length)
            return Qwen3Config(**sizes, tie_word_embeddings=True)
        case "tiny-mixture":
            sizes = _sizes(hidden=64, inside=96, layers=2, heads=(4, 2, 16), vocabulary=256, length=length)
            return Qwen3MoeConfig(**sizes, **_experts(4, 2, 48))
    raise ValueError(f"no shape of this name: {name}")


def _sizes(*, hidden: int, inside: int, layers: int, heads: tuple[int, int, int], vocabulary: int, length: int) -> dict:
    queries, keys, features = heads
    return {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": features,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
    }


def _experts(number: int, per_token: int, inside: int) -> dict:
    return {
        "num_experts": number,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": inside,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }


def matrix_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """Number of parameters in matrices: all of them, and those active for one token. Embedding look-ups are in neither."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    attention = config.hidden_size * config.head_dim * heads
    output = config.hidden_size * config.vocab_size
    if isinstance(config, Qwen3MoeConfig):
        expert, router = 3 * config.hidden_size * config.moe_intermediate_size, config.hidden_size * config.num_experts
        inside = [router + count * expert for count in (config.num_experts, config.num_experts_per_tok)]
    else:
        inside = [3 * config.hidden_size * config.intermediate_size] * 2
    total, active = (config.num_hidden_layers * (attention + each) + output for each in inside)
    return total, active


def operations_per_token(config: PretrainedConfig, length: int) -> float:
    """Floating-point operations of forward and backward pass per token."""
    heads = config.num_attention_heads * config.head_dim
    return 6 * matrix_parameters(config)[1] + 12 * config.num_hidden_layers * heads * length / 2


def random_micro_batches(
    config: PretrainedConfig, sequences: int, length: int, training: TrainingConfig
) -> list[MicroBatch]:
    """Build micro-batches of random sequences of one length, each in its own row."""
    rng, count = random.Random(0), sequences * (length - PROMPT_TOKENS)
    samples = [
        Sample(
            token_ids=tuple(rng.randrange(config.vocab_size) for _ in range(length)),
            trained=(False,) * PROMPT_TOKENS + (True,) * (length - PROMPT_TOKENS),
        )
        for _ in range(sequences)
    ]
    turn_N = torch.arange(sequences).repeat_interleave(length - PROMPT_TOKENS)
    tokens = TokenData(
        sampler_logprobs_N=torch.full((count,), -10.0),
        turn_N=turn_N,
        advantages_N=torch.randn(sequences)[turn_N],
        weights_N=torch.ones(count),
        is_fresh_N=torch.ones(count, dtype=torch.bool),
    )
    return build_micro_batches(
        samples,
        tokens,
        chosen=range(sequences),
        counts=GlobalCounts(count, sequences),
        rank=0,
        num_ranks=1,
        limits=PackingLimits(training.micro_batch_tokens, None, Packing.ROWS),
    )


def measure(options: argparse.Namespace, config: PretrainedConfig, model: PretrainedModel) -> None:
    """Plan memory, build the backend, repeat optimizer steps for `options.seconds`, and print all numbers."""
    training = TrainingConfig(
        backend=BackendKind.MEGATRON,
        precision=Precision.BFLOAT16,
        micro_batch_tokens=options.micro_batch_tokens,
        activation_checkpointing=options.recompute,
        packing=Packing.NONE,  # as in `random_micro_batches`: every row is one sequence
    )
    plan = planned_memory(training, model)
    terms = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "step_temporaries")
    print(f"planned: peak {plan.peak:.1f} GB ({', '.join(f'{term} {getattr(plan, term):.1f}' for term in terms)})")
    if options.plan_only:
        return
    began_at = time.perf_counter()
    backend = MegatronBackend(model, MegatronSettings(training, 0, 1.0, DEVICE, InitialWeights.DRAWN))
    backend.start_optimizer(OptimizerConfig(), total_steps=1000)
    print(f"built in {time.perf_counter() - began_at:.0f} s: {memory_sentence()}")
    micro_batches = random_micro_batches(config, options.sequences, options.length, training)
    loss = build_algorithm(Grpo(), num_optimizer_steps=1, max_new_tokens=options.length).loss

    def step() -> None:
        backend.accumulate(micro_batches, loss)
        metrics = backend.apply_gradients()
        assert not metrics["update/skipped_steps"], metrics

    seconds = [timed(step)]
    while sum(seconds) < options.seconds or len(seconds) < 4:
        seconds.append(timed(step))
    later = sorted(seconds[1:])
    rate = options.sequences * options.length / later[len(later) // 2]
    print(
        f"{options.sequences} sequences of {options.length}, micro-batches of {options.micro_batch_tokens} tokens"
        f"{', recomputed' if options.recompute else ''}: {rate:,.0f} tokens/s (median of {len(later)} steps, "
        f"{later[0]:.2f} to {later[-1]:.2f} s), MFU {rate * operations_per_token(config, options.length) / PEAK_FLOPS:.1%}, "
        f"first step {seconds[0]:.1f} s"
    )
    print(f"measured: {memory_sentence()}; planned against measured peak: {plan.peak / peak_gb() - 1:+.1%}")
    if DEVICE.type == "cuda":
        print_profile(step)


def timed(step: Callable[[], None]) -> float:
    """Seconds of one step, until the GPU is done with it."""
    began_at = time.perf_counter()
    step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_at


def memory_sentence() -> str:
    """GB (1e9 bytes) of GPU memory allocated now, at the peak, and reserved at the peak."""
    if DEVICE.type != "cuda":
        return "no GPU"
    now, most = torch.cuda.memory_allocated() / 1e9, torch.cuda.max_memory_allocated() / 1e9
    return f"{now:.1f} GB allocated, peak {most:.1f}, reserved peak {torch.cuda.max_memory_reserved() / 1e9:.1f}"


def peak_gb() -> float:
    """Peak of allocated GPU memory in GB (1e9 bytes); NaN without a GPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if DEVICE.type == "cuda" else math.nan


def planned_memory(training: TrainingConfig, model: PretrainedModel) -> TrainerMemory:
    """Memory of the trainer as the planner predicts it."""
    config = RunConfig(
        name="parts", iterations=1, model=model, training=training, cluster=ClusterConfig(device=DeviceKind.CUDA)
    )
    shape = shape_of(model)
    assert shape is not None
    return trainer_memory(config, shape)


def print_profile(step: Callable[[], None]) -> None:
    """Print the ten kernels that take most of one optimizer step, with their share and number of launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        seconds = timed(step)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / 1e6
    print(f"one step of {seconds:.2f} s, GPU busy for {busy / seconds:.0%} of it:")
    for event in events[:10]:
        print(f"  {event.self_device_time_total / 1e6 / seconds:5.1%} {event.count:6d} x {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["dense-1.7b", "mixture-4b", "tiny", "tiny-mixture"], default="dense-1.7b")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of training, the first step included")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--plan-only", action="store_true", help="print planned memory only; needs no GPU")
    parser.add_argument("--recompute", action="store_true", help="set training.activation_checkpointing")
    options = parser.parse_args()
    config = model_config(options.shape, options.length)
    total, active = matrix_parameters(config)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    sizes = f"{total / 1e9:.2f} billion parameters in matrices, {active / 1e9:.2f} billion active per token"
    print(f"{name}, torch {torch.__version__}, {options.shape}: {sizes}")
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        measure(options, config, PretrainedModel(path=folder, max_positions=options.length))


if __name__ == "__main__":
    main()
