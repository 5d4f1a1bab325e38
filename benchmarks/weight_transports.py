"""Seconds to publish weights to engines by transport, and the size of a weights version as a delta.

    python -m benchmarks.weight_transports [--megabytes 500] [--versions 4] [--engines 2]

Needs CPUs only. Starts a real trainer rank and real torch engines; between versions the policy changes by a step of Adam's
size. The first table has the seconds of `publish` by transport: gather, digests, transfer, load, and the check that both
sides have the same weights. It shows the first version (sent whole, with a process group to form) and the median of the
others. The second table has the size of a version as a delta to the version before, after policy-gradient steps of AdamW on
random tokens, by learning rate and dtype.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from roll_core.config.load import validate_config
from roll_core.config.model import ScratchModel
from roll_core.config.operations.weights import WeightsTransport
from roll_core.config.run import RunConfig
from roll_core.models.causal_lm import build_model
from roll_core.roles.fleet import RANK_0, Fleet
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import open_run
from roll_core.weights.stored import encode_delta

HIDDEN, INTERMEDIATE = 576, 1536
PARAMETERS_PER_LAYER = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 3 + 3 * INTERMEDIATE)
STEP = 1e-6
"""Size of an optimizer step: the usual learning rate of Adam."""


def build_model_config(megabytes: int) -> ScratchModel:
    """Model with layers of SmolLM2-135M's shape that takes about this many MB (1e6 bytes) in float32."""
    num_layers = max(1, round(megabytes * 1e6 / 4 / PARAMETERS_PER_LAYER))
    return ScratchModel(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_layers=num_layers,
        num_heads=9,
        num_kv_heads=3,
        max_positions=32,
    )


def build_config(folder: Path, transport: WeightsTransport, options: argparse.Namespace) -> RunConfig:
    sections: dict[str, Any] = {
        "name": f"by-{transport}",
        "iterations": 1,
        "model": build_model_config(options.megabytes).model_dump(),
        "rollout": {"num_groups": 2, "group_size": 2, "max_new_tokens": 5},
        "cluster": {"devices_per_node": 1 + options.engines},
        "placement": {"trainer": [0], "engines": list(range(1, 1 + options.engines))},
        "weights": {"transport": transport},
        "store": {"uri": str(folder / "store")},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
        "work_dir": str(folder / "work"),
    }
    return validate_config(sections, "benchmark")


def change_weights(rank: Any) -> None:
    """Add noise of an optimizer step's size to all weights; runs in the trainer rank."""
    with torch.no_grad():
        for parameter in rank._learner._policy._scorer.model.parameters():
            parameter.add_(torch.randn_like(parameter).mul_(0.3 * STEP))


def publish_times(transport: WeightsTransport, options: argparse.Namespace) -> tuple[list[float], int]:
    """Publish several versions; return the seconds of each, and the bytes that one engine received for the last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = build_config(folder, transport, options)
        run = open_run(ObjectStore(config.store.uri), config)
        leg_dir = folder / "work" / run.run_id / "leg-1"
        leg_dir.mkdir(parents=True)
        seconds = []
        with Fleet(run, config, leg_dir) as fleet:
            for version in range(options.versions):
                ray.get(fleet._ranks[RANK_0].__ray_call__.remote(change_weights))
                began_at = time.perf_counter()
                published = fleet.publish(version)
                seconds.append(time.perf_counter() - began_at)
        return seconds, published.num_bytes // options.engines


def print_transports(options: argparse.Namespace) -> None:
    print(f"{f'publish to {options.engines} engines':<20} {'first s':>8} {'later s':>8} {'GB/s per engine':>16}")
    for transport in (WeightsTransport.RAY, WeightsTransport.BROADCAST, WeightsTransport.STORE):
        (first, *others), num_bytes = publish_times(transport, options)
        later = statistics.median(others)
        print(f"{transport:<20} {first:8.2f} {later:8.2f} {num_bytes / later / 1e9:16.2f}", flush=True)


def print_deltas(learning_rates: tuple[float, ...] = (1e-6, 1e-5)) -> None:
    print("\nlearning rate   dtype      changed elements   size of the delta")
    for learning_rate in learning_rates:
        before, after = two_versions(learning_rate)
        for dtype in (torch.float32, torch.bfloat16):
            old, new = (flat.to(dtype).view(torch.uint8).numpy() for flat in (before, after))
            share = len(encode_delta(old, new, dtype.itemsize)) / new.nbytes
            changed = np.mean((old != new).reshape(-1, dtype.itemsize).any(axis=1))
            print(f"{learning_rate:13.0e}   {str(dtype)[6:]:<10} {changed:16.1%} {share:19.1%}", flush=True)


def two_versions(learning_rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat weights of a policy before and after the last of eight optimizer steps."""
    policy = build_model(build_model_config(60).model_copy(update={"init_std": 0.02}), seed=0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    before = torch.empty(0)
    for _ in range(8):
        before = flatten(policy)
        tokens_BT = torch.randint(2, 60, (16, 24), generator=generator)
        advantages_B = torch.randn(16, generator=generator)
        logprobs_BTV = policy(tokens_BT).logits[:, :-1].log_softmax(-1)
        chosen_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None]).squeeze(2)
        (-(advantages_B[:, None] * chosen_BT).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, flatten(policy)


def flatten(policy: torch.nn.Module) -> torch.Tensor:
    """Copy all parameters into one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--engines", type=int, default=2)
    options = parser.parse_args()
    print_transports(options)
    print_deltas()


if __name__ == "__main__":
    main()
