"""Learning curve and speed of every algorithm of the catalogue on the quickstart's problem.

    python -m benchmarks.algorithms [--only grpo,ppo] [--iterations 40] [--set training.optimizer_steps=4]

Needs a CPU only. Runs `roll run` once per algorithm, one after another, with the seed, problems, model and learning rate of
the quickstart. Only the algorithm differs; `EXTRA_SETTINGS` lists the few keys that some algorithms need beside their
defaults on such a small model. Prints one row per algorithm: held-out accuracy, median seconds per iteration and its parts,
and the signals it needs. A run that fails is a row with its error.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.roll_runs import QUICKSTART, machine_load, timed_iterations
from roll_core.algorithms.catalog import TABLE
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, read_chain, read_config

EXTRA_SETTINGS = {
    "reinforce": ["algorithm.shaping.normalize={mean: batch, std: batch}"],
    "ppo": ["algorithm.critic={optimizer: {learning_rate: 1.0e-3}, warmup_iterations: 3}"],
    "distillation": ["algorithm.teachers=[{kind: run, run_id: grpo-1}]"],
}
"""Overrides by algorithm. Distillation's teacher is the GRPO run, so that GRPO runs first."""


@dataclass(frozen=True)
class Outcome:
    """Result of one run: accuracies in order, median seconds per iteration, or the last line of its error."""

    kind: str
    signals: str
    accuracy: list[float]
    seconds: float
    prepare: float
    update: float
    failure: str = ""


def run(kind: str, folder: Path, iterations: int, overrides: list[str]) -> Outcome:
    """Train with one algorithm in `folder`; runs in the same folder share a store."""
    extra = EXTRA_SETTINGS.get(kind, [])
    settings = [f"name={kind}", f"algorithm.kind={kind}", f"iterations={iterations}", *extra, *overrides]
    command = [str(Path(sys.executable).with_name("roll")), "run", str(QUICKSTART)]
    for setting in settings:
        command += ["--set", setting]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        return Outcome(kind, "", [], 0, 0, 0, (ended.stderr or ended.stdout).strip().splitlines()[-1])
    store = ObjectStore(f"file://{folder}/roll-data/store")
    reference = find_run(store, f"{kind}-1")
    config, chain = read_config(reference), read_chain(store, f"{kind}-1")
    algorithm = config.algorithm
    signals = algorithm.credit_signals | algorithm.loss_signals(config.training.optimizer_steps)
    timed = timed_iterations(chain)
    return Outcome(
        kind,
        ", ".join(sorted(signals)) or "-",
        [manifest.evaluated.accuracy for manifest in chain if manifest.evaluated],
        median(t.seconds for t in timed),
        median(t.manifest.timings["prepare"] for t in timed),
        median(t.manifest.timings["update"] + t.manifest.timings.get("update_critic", 0.0) for t in timed),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="algorithms to run, separated by commas; default: all")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args()
    kinds = options.only.split(",") if options.only else [row.kind for row in TABLE]
    kinds.sort(key=lambda kind: kind != "grpo")
    print(f"{options.iterations} iterations each, {machine_load()}, {' '.join(options.overrides)}")
    print("Held-out accuracy at the start, halfway, at the end, and the best; median seconds per iteration, prepare, update")
    print(f"{'algorithm':20}  start   half    end   best  s/iter  prepare  update  signals")
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            print(_line(run(kind, Path(folder), options.iterations, options.overrides)), flush=True)


def _line(outcome: Outcome) -> str:
    if outcome.failure:
        return f"{outcome.kind:20} failed: {outcome.failure}"
    accuracy = outcome.accuracy
    points = [accuracy[0], accuracy[len(accuracy) // 2], accuracy[-1], max(accuracy)]
    columns = " ".join(f"{point:6.2f}" for point in points)
    return (
        f"{outcome.kind:20} {columns} {outcome.seconds:7.2f} {outcome.prepare:8.3f} {outcome.update:7.3f}  {outcome.signals}"
    )


if __name__ == "__main__":
    main()
