"""Speed and accuracy of GRPO by roll and by TRL's GRPOTrainer on the same config.

    python -m benchmarks.grpo_vs_trl [CONFIG] [--engine torch] [--engine vllm] [--iterations 40] [--seed 0] [--set KEY=VALUE]

Needs TRL (`make setup-bench`), and a GPU if CONFIG says `cluster.device: cuda`. Runs `roll run` of CONFIG (default: the
quickstart) once per engine with everything on: Prefect, Ray, store, MLflow. Then runs TRL from the policy of iteration 0.
Each runs in its own process, one after another. TRL generates with transformers on a CPU, and with vLLM on the trainer's
GPU. Prints for each side: seconds per iteration (median, mean), generated tokens per second, rewards, held-out greedy
accuracy by the same evaluation, seconds by stage, and the ratios.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.in_process import checkpoint_at, held_out_accuracy, open_learner
from benchmarks.roll_runs import (
    QUICKSTART,
    REPOSITORY,
    WARM_UP,
    FinishedRun,
    machine_load,
    only_at_the_end,
    run_config,
    timed_iterations,
)
from benchmarks.trl_grpo import TrlIteration
from roll_core.config.algorithm.policy_update import Aggregation
from roll_core.config.load import load_config
from roll_core.config.model import PretrainedModel
from roll_core.config.run import RunConfig
from roll_core.models.export import write_folder
from roll_core.reporting.report import stage_seconds
from roll_core.types.manifest import Manifest

AT_THE_END = 3
"""Number of timed iterations whose mean reward is reported as the reward at the end."""


@dataclass(frozen=True)
class Side:
    """Numbers of roll or of TRL over the timed iterations."""

    name: str
    seconds: list[float]
    num_tokens: int
    rewards: list[float]
    accuracy: float
    parts: dict[str, float]
    """Mean seconds per iteration, by stage."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / sum(self.seconds)


def roll_side(run: FinishedRun) -> Side:
    """Numbers of a finished run, from its manifests and its last checkpoint."""
    timed = timed_iterations(run.chain)
    stages = [stage_seconds(iteration.manifest) | {"commit": iteration.commit_seconds} for iteration in timed]
    return Side(
        name=f"roll, {run.config.inference.kind}",
        seconds=[iteration.seconds for iteration in timed],
        num_tokens=sum(_num_tokens(iteration.manifest) for iteration in timed),
        rewards=[iteration.manifest.metrics["reward/mean"] for iteration in timed],
        accuracy=accuracy_at(run, run.config.iterations),
        parts={
            "collect": statistics.mean(s["collect"] for s in stages),
            "prepare + update": statistics.mean(s["prepare"] + s["update"] for s in stages),
            "publish": statistics.mean(s["publish"] for s in stages),
            "control plane": statistics.mean(s["other"] + s["commit"] for s in stages),
        },
    )


def trl_side(config: RunConfig, iterations: Sequence[TrlIteration], trained: Path) -> Side:
    """Numbers of TRL, from its iterations and the folder of its trained policy."""
    timed = iterations[WARM_UP:-1]
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    return Side(
        name="TRL",
        seconds=[iteration.seconds for iteration in timed],
        num_tokens=sum(iteration.num_tokens for iteration in timed),
        rewards=[iteration.mean_reward for iteration in timed],
        accuracy=held_out_accuracy(config, dict(model.named_parameters())),
        parts={
            "generate": statistics.mean(i.generate_seconds for i in timed),
            "score + update": statistics.mean(i.seconds - i.generate_seconds for i in timed),
        },
    )


def accuracy_at(run: FinishedRun, iteration: int) -> float:
    """Held-out accuracy of the checkpoint after an iteration."""
    return held_out_accuracy(run.config, dict(open_learner(run, checkpoint_at(run, iteration)).weights()))


def run_roll(options: argparse.Namespace, engine: str, folder: Path) -> FinishedRun:
    """Run the config with one engine, with its data in `folder`."""
    folder.mkdir()
    overrides = [
        *only_at_the_end(options.iterations),
        f"seed={options.seed}",
        f"inference.kind={engine}",
        *options.overrides,
    ]
    config = load_config(options.config, overrides)
    check_comparable(config)
    if isinstance(config.model, PretrainedModel):  # the resolved path: a relative one would start at the run's folder
        overrides.append(f"model.path={config.model.path}")
    return run_config(options.config, folder, overrides)


def run_trl(run: FinishedRun, micro_batch: int | None, folder: Path) -> list[TrlIteration]:
    """Run TRL in its own process, from the policy of the run's iteration 0."""
    folder.mkdir()
    (folder / "config.json").write_text(run.config.model_dump_json())
    write_folder(run.config.model, open_learner(run, checkpoint_at(run, 0)).weights(), folder / "model")
    command = [sys.executable, "-m", "benchmarks.trl_grpo", str(folder)]
    if micro_batch is not None:
        command += ["--micro-batch", str(micro_batch)]
    log = folder / "trl.log"
    with open(log, "wb") as output:
        ended = subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        sys.exit(f"TRL ended with {ended.returncode}:\n{log.read_text()[-2000:]}")
    return [TrlIteration.model_validate_json(line) for line in (folder / "iterations.jsonl").read_text().splitlines()]


def check_comparable(config: RunConfig) -> None:
    """Exit if the config has a setting that the TRL side cannot repeat: the two would do different work."""
    needed = {
        "algorithm.kind=grpo": config.algorithm.kind == "grpo",
        "algorithm.aggregation=token_mean": config.algorithm.aggregation is Aggregation.TOKEN_MEAN,
        "algorithm.kl_loss=null": config.algorithm.kl_loss is None,
        "algorithm.entropy_coefficient=0": config.algorithm.entropy_coefficient == 0,
        "algorithm.correction=null": config.algorithm.correction is None,
        "training.optimizer_steps=1": config.training.optimizer_steps == 1,
        "training.epochs=1": config.training.epochs == 1,
        "rollout.filter=null": config.rollout.filter is None,
        "rollout.async_ratio=0": config.rollout.async_ratio == 0,
    }
    for setting, holds in needed.items():
        if not holds:
            sys.exit(f"--set: the TRL side needs {setting}")


def print_header(config: RunConfig, num_timed: int, loads: dict[str, str]) -> None:
    rollout = config.rollout
    print(f"{config.name}: {rollout.num_groups} problems x {rollout.group_size} attempts, up to ", end="")
    print(f"{rollout.max_new_tokens} tokens each, {config.iterations} updates, seed {config.seed}, ", end="")
    print(f"{config.cluster.device.value}, {config.cluster.threads_per_device} torch threads on all sides.")
    print(f"Timed: {num_timed} iterations; the first {WARM_UP} (warm-up) and the last (where roll evaluates and writes a")
    print("checkpoint, which TRL does not) are left out on all sides. roll: commit to commit, everything included.")
    print("TRL: end of step to end of step. They ran one after the other: compare them only if the load was the same.")
    for moment, load in loads.items():
        print(f"{moment}: {load}")
    print()


def print_table(roll_sides: Sequence[Side], trl: Side, before: float) -> None:
    """Print all numbers; `before` is the held-out accuracy of iteration 0."""
    sides = [*roll_sides, trl]
    rows = [
        ("s/iteration, median", [statistics.median(side.seconds) for side in sides], ".3f"),
        ("s/iteration, mean", [statistics.mean(side.seconds) for side in sides], ".3f"),
        ("tokens/s", [side.tokens_per_second for side in sides], ".0f"),
        ("mean reward, timed iterations", [statistics.mean(side.rewards) for side in sides], ".3f"),
        (f"mean reward, last {AT_THE_END} of them", [statistics.mean(side.rewards[-AT_THE_END:]) for side in sides], ".3f"),
        ("held-out accuracy, before", [before for _ in sides], ".3f"),
        ("held-out accuracy, after", [side.accuracy for side in sides], ".3f"),
    ]
    print(f"{'':<32}" + "".join(f"{side.name:>14}" for side in sides))
    for label, values, form in rows:
        print(f"{label:<32}" + "".join(f"{value:>14{form}}" for value in values))
    for side in roll_sides:
        ratio = statistics.median(trl.seconds) / statistics.median(side.seconds)
        print(f"{side.name}: {ratio:.2f} times as fast as TRL, by the median iteration")
    for side in sides:
        parts = ", ".join(f"{part} {1000 * seconds:.0f}" for part, seconds in side.parts.items())
        print(f"{side.name}, mean ms per iteration: {parts}")


def _num_tokens(manifest: Manifest) -> int:
    assert manifest.collected is not None
    return manifest.collected.num_tokens


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Run both sides and print their table."""
    loads, runs = {"before": machine_load()}, []
    for engine in options.engines or ["torch"]:
        runs.append(run_roll(options, engine, folder / engine))
        loads[f"after roll, {engine}"] = machine_load()
    iterations = run_trl(runs[0], options.trl_micro_batch, folder / "trl")
    loads["after TRL"] = machine_load()
    config = runs[0].config
    torch.set_num_threads(config.cluster.threads_per_device)
    roll_sides = [roll_side(run) for run in runs]
    trl = trl_side(config, iterations, folder / "trl" / "trained")
    print_header(config, len(trl.seconds), loads)
    print_table(roll_sides, trl, accuracy_at(runs[0], 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=QUICKSTART, metavar="CONFIG")
    parser.add_argument(
        "--engine", dest="engines", action="append", choices=["torch", "vllm"], help="engine of roll; default: torch"
    )
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl-micro-batch", type=int, help="sequences TRL trains on at once; default: all of an iteration")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="passed to roll")
    options = parser.parse_args()
    disable_progress_bar()
    if options.iterations < WARM_UP + 1 + AT_THE_END:
        parser.error(
            f"--iterations must be at least {WARM_UP + 1 + AT_THE_END}: {WARM_UP} warm up and the last is not timed"
        )
    with tempfile.TemporaryDirectory(prefix="grpo-vs-trl-") as folder:
        compare(options, Path(folder))


if __name__ == "__main__":
    main()
