"""Does working ahead of training hurt what is learnt? The quickstart's problem, synchronous and asynchronous, seed by seed.

    python benchmarks/async_learning.py [--seeds 3] [--iterations 40] [--ratio 2]

Real runs, one after another, each of as many samples: engine and trainer on a device (a core) of their own, synchronous;
working ahead of training with truncated importance sampling (`algorithm.correction`); and without it. Prints held-out
accuracy along the way, the time from the first policy to the last, and how stale the tokens were.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from roll_runs import FinishedRun, machine_load, run_quickstart

OWN_DEVICES = [
    "cluster={devices_per_node: 2, threads_per_device: 1}",
    "placement={trainer: [0], engines: [1]}",
    "checkpoint.every=20",
]


@dataclass(frozen=True)
class Way:
    name: str
    overrides: list[str]


def ways(ratio: float) -> list[Way]:
    ahead = [*OWN_DEVICES, f"rollout.async_ratio={ratio}"]
    return [
        Way("synchronous", OWN_DEVICES),
        Way(f"ratio {ratio:g}, corrected", [*ahead, "algorithm.correction={}"]),
        Way(f"ratio {ratio:g}, uncorrected", ahead),
    ]


@dataclass(frozen=True)
class Learnt:
    accuracy: list[float]
    seconds: float
    staleness: float
    idle: float

    @property
    def late(self) -> float:
        """Mean of the last three evaluations: a single one of 256 problems is worth about a percent more or less."""
        return statistics.fmean(self.accuracy[-3:])


def learnt(finished: FinishedRun) -> Learnt:
    chain = finished.chain
    began, ended = (datetime.fromisoformat(manifest.committed_at) for manifest in (chain[0], chain[-1]))
    return Learnt(
        [manifest.evaluated.accuracy for manifest in chain if manifest.evaluated],
        (ended - began).total_seconds(),
        statistics.fmean(manifest.metrics["rollout/staleness_mean"] for manifest in chain[1:]),
        statistics.fmean(manifest.metrics["throughput/trainer_idle"] for manifest in chain[1:]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--ratio", type=float, default=2.0)
    options = parser.parse_args()
    print(machine_load())
    print(f"{'way':<24}{'seed':>5}{'seconds':>9}{'staleness':>11}{'trainer idle':>14}  held-out accuracy")
    for way in ways(options.ratio):
        results = []
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                overrides = [f"seed={seed}", f"iterations={options.iterations}", *way.overrides]
                results.append(learnt(run_quickstart(Path(folder), overrides)))
            curve = " ".join(f"{accuracy:.2f}" for accuracy in results[-1].accuracy)
            row = results[-1]
            print(f"{way.name:<24}{seed:>5}{row.seconds:>9.1f}{row.staleness:>11.2f}{row.idle:>14.0%}  {curve}", flush=True)
        seconds, late = (statistics.fmean(values) for values in zip(*((r.seconds, r.late) for r in results), strict=True))
        print(f"{way.name:<24} mean{seconds:>9.1f}{'':>25}  late accuracy {late:.3f}", flush=True)


if __name__ == "__main__":
    main()
