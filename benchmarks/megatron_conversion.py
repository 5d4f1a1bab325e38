"""Peak memory of reading a Hugging Face folder into Megatron's model and writing it back, beyond the model itself.

    python -m benchmarks.megatron_conversion [--model dense|mixture] [--ranks 2] [--layout tensor=2] [--shard-megabytes 300]

Needs Linux, a CPU and megatron-core. Writes a folder of random weights in several shards. Every rank reads its slices, then
all ranks write the folder again. A peak is resident memory (VmHWM), mapped files included, above what a rank has once all
pages of its model are allocated. Prints peaks in MB and as a multiple of the largest shard, and asserts that the two folders
are equal to the bit.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import TrainingConfig
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.models.megatron_names import MegatronNames
from roll_core.models.tensor_files import TensorFiles, WriterRank, write_tensors
from roll_core.weights.shards import TensorGatherer, load_shards

SIZES = {"vocab_size": 32_000, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 16}
MODELS = {
    "dense": Qwen3Config(**SIZES, hidden_size=1024, head_dim=64, intermediate_size=3072, tie_word_embeddings=True),
    "mixture": Qwen3MoeConfig(
        **SIZES, hidden_size=512, head_dim=32, intermediate_size=1024, moe_intermediate_size=256, num_experts=32
    ),
}
MAX_PEAK = 1.5
"""Most memory beyond the model, as a multiple of the largest shard."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layout", nargs="*", default=[], metavar="NAME=SIZE", help="keys of training.layout")
    parser.add_argument("--shard-megabytes", type=int, default=300)
    options = parser.parse_args()
    layout = LayoutConfig(**{name: int(size) for name, size in (each.split("=") for each in options.layout)})
    with tempfile.TemporaryDirectory() as scratch:
        folder, shard_bytes = Path(scratch), options.shard_megabytes * 10**6
        config = MODELS[options.model]
        config.save_pretrained(folder / "before")
        write_tensors(random_weights(config), folder / "before", shard_bytes)
        mp.start_processes(convert, (options.ranks, layout, folder, shard_bytes), options.ranks, start_method="spawn")
        largest = max(file.stat().st_size for file in (folder / "before").glob("*.safetensors"))
        total = sum(file.stat().st_size for file in (folder / "before").glob("*.safetensors"))
        print(f"{options.model}, {total / 1e6:.0f} MB, largest shard {largest / 1e6:.0f} MB; {options.layout or 'one rank'}")
        worst = 0.0
        for rank in range(options.ranks):
            peaks = json.loads((folder / f"peaks-{rank}.json").read_text())
            worst = max(worst, *(peak / largest for peak in peaks.values()))
            print(f"rank {rank}: " + ", ".join(f"{step} {p / 1e6:.0f} MB, {p / largest:.2f}" for step, p in peaks.items()))
        print(f"peak beyond the model: {worst:.2f} of the largest shard; {compare(folder)} tensors are bit-equal")
        assert worst < MAX_PEAK, f"more than {MAX_PEAK}"


def convert(rank: int, num_ranks: int, layout: LayoutConfig, folder: Path, shard_bytes: int) -> None:
    """Read the folder `before` into a model and write it to `after`, in one rank; leave the peaks in a file."""
    from roll_core.training.megatron.cpu import on_device

    with on_device():
        from roll_core.training.megatron.model import build_chunks
        from roll_core.training.megatron.shards import shards_of
        from roll_core.training.megatron.world import initialize_layout

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
        training, device = TrainingConfig(backend="megatron", layout=layout), torch.device("cpu")
        config = AutoConfig.from_pretrained(folder / "before")
        initialize_layout(layout, device, seed=0)
        chunks = build_chunks(config, training, device)
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            parameter.data.zero_()  # touches all pages, so that they count before the peak is measured
        shards, names, peaks = shards_of(chunks), MegatronNames(config), {}
        with peak_memory(peaks, "read"):
            load_shards(shards, names, TensorFiles(folder / "before"))
        with peak_memory(peaks, "write"):
            weights = TensorGatherer(shards, names, bucket_bytes=shard_bytes // 8).tensors(
                lambda each: each.data, torch.float32
            )
            write_tensors(weights, folder / "after", shard_bytes, WriterRank(rank, num_ranks))
        (folder / f"peaks-{rank}.json").write_text(json.dumps(peaks))
        dist.destroy_process_group()


def random_weights(config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Random tensors with the names and shapes of a model, drawn one at a time."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return ((name, torch.randn(tensor.shape)) for name, tensor in to_checkpoint_names(model.named_parameters()))


@contextmanager
def peak_memory(peaks: dict[str, int], step: str) -> Iterator[None]:
    """Record the peak of resident memory within the body, in bytes above the resident memory before it."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    yield
    peaks[step] = resident("VmHWM") - before


def resident(quantity: str) -> int:
    """Bytes of a memory quantity of this process, such as VmRSS."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(quantity))
    return int(line.split()[1]) * 1024


def compare(folder: Path) -> int:
    """Assert that the folders `before` and `after` have equal tensors; return their number."""
    before, after = TensorFiles(folder / "before"), TensorFiles(folder / "after")
    assert list(before.names) == list(after.names)
    for name in before.names:
        assert torch.equal(before.read(name, (slice(None),)), after.read(name, (slice(None),))), name
    return len(list(before.names))


if __name__ == "__main__":
    main()
