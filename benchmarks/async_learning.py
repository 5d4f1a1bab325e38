"""Effect of asynchronous rollouts on learning: the quickstart's problem, synchronous and asynchronous, several seeds each.

    python -m benchmarks.async_learning [--seeds 3] [--iterations 40] [--ratio 2]

Needs two CPU cores: engine and trainer have one each. Runs `roll run` once per setting and seed, one after another, each
with the same number of samples: synchronous; asynchronous with truncated importance sampling (`algorithm.correction`);
asynchronous without it. Prints held-out accuracy at every evaluation, seconds from the first policy to the last, mean
staleness of the tokens, and the share of time in which the trainer was idle.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.roll_runs import FinishedRun, machine_load, run_quickstart

OWN_DEVICES = [
    "cluster={devices_per_node: 2, threads_per_device: 1}",
    "placement={trainer: [0], engines: [1]}",
    "checkpoint.every=20",
]


@dataclass(frozen=True)
class Setting:
    """Overrides of the quickstart that are compared, with the name of their rows."""

    name: str
    overrides: list[str]


def settings(ratio: float) -> list[Setting]:
    asynchronous = [*OWN_DEVICES, f"rollout.async_ratio={ratio}"]
    return [
        Setting("synchronous", OWN_DEVICES),
        Setting(f"ratio {ratio:g}, corrected", [*asynchronous, "algorithm.correction={}"]),
        Setting(f"ratio {ratio:g}, uncorrected", asynchronous),
    ]


@dataclass(frozen=True)
class LearningCurve:
    """Accuracy at every evaluation, seconds of the run, mean staleness of tokens, mean idle share of the trainer."""

    accuracy: list[float]
    seconds: float
    staleness: float
    idle: float

    @property
    def late_accuracy(self) -> float:
        """Mean of the last three evaluations: one evaluation of 256 problems is off by about one percent."""
        return statistics.fmean(self.accuracy[-3:])


def learning_curve(finished: FinishedRun) -> LearningCurve:
    chain = finished.chain
    began, ended = (datetime.fromisoformat(manifest.committed_at) for manifest in (chain[0], chain[-1]))
    return LearningCurve(
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
    print(f"{'setting':<24}{'seed':>5}{'seconds':>9}{'staleness':>11}{'trainer idle':>14}  held-out accuracy")
    for setting in settings(options.ratio):
        results = []
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                overrides = [f"seed={seed}", f"iterations={options.iterations}", *setting.overrides]
                results.append(learning_curve(run_quickstart(Path(folder), overrides)))
            curve = " ".join(f"{accuracy:.2f}" for accuracy in results[-1].accuracy)
            row = results[-1]
            numbers = f"{row.seconds:>9.1f}{row.staleness:>11.2f}{row.idle:>14.0%}"
            print(f"{setting.name:<24}{seed:>5}{numbers}  {curve}", flush=True)
        seconds, late = (statistics.fmean(v) for v in zip(*((r.seconds, r.late_accuracy) for r in results), strict=True))
        print(f"{setting.name:<24} mean{seconds:>9.1f}{'':>25}  last three evaluations, mean {late:.3f}", flush=True)


if __name__ == "__main__":
    main()
