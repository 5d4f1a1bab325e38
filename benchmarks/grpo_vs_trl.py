"""GRPO by this system and by TRL's GRPOTrainer, side by side on the quickstart: how fast, and how good the policy gets.

    python benchmarks/grpo_vs_trl.py [--iterations 40] [--seed 0] [--threads 2] [--set KEY=VALUE ...]

Needs `pip install 'trl==1.16.*'`. Runs `roll run` (everything on: Prefect, Ray, store, MLflow), then TRL from the same
warm-started weights, each in its own process, never at the same time. Prints for both: seconds per iteration (median, mean),
generated tokens per second, held-out greedy accuracy by the same evaluation, where the time went, and the ratios.
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
from in_process import checkpoint_at, held_out_accuracy, open_learner, save_pretrained
from roll_runs import WARM_UP, FinishedRun, machine_load, only_at_the_end, run_quickstart, timed_iterations
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar
from trl_grpo import TrlIteration

from roll_core.config.model import ScratchModel
from roll_core.config.policy_update import Aggregation
from roll_core.config.run import RunConfig
from roll_core.reporting.report import stage_seconds
from roll_core.types.manifest import Manifest


@dataclass(frozen=True)
class Side:
    """One system's numbers over the timed iterations."""

    name: str
    seconds: list[float]
    num_tokens: int
    rewards: list[float]
    accuracy: float
    parts: dict[str, float]
    """Mean seconds per iteration by what they went to."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / sum(self.seconds)


def roll_side(run: FinishedRun, accuracy: float) -> Side:
    timed = timed_iterations(run.chain)
    stages = [stage_seconds(iteration.manifest) | {"commit": iteration.commit_seconds} for iteration in timed]
    return Side(
        name="roll",
        seconds=[iteration.seconds for iteration in timed],
        num_tokens=sum(_num_tokens(iteration.manifest) for iteration in timed),
        rewards=[iteration.manifest.metrics["reward/mean"] for iteration in timed],
        accuracy=accuracy,
        parts={
            "collect": statistics.mean(s["collect"] for s in stages),
            "prepare + update": statistics.mean(s["prepare"] + s["update"] for s in stages),
            "publish": statistics.mean(s["publish"] for s in stages),
            "control plane": statistics.mean(s["other"] + s["commit"] for s in stages),
        },
    )


def trl_side(iterations: Sequence[TrlIteration], accuracy: float) -> Side:
    timed = iterations[WARM_UP:-1]
    return Side(
        name="trl",
        seconds=[iteration.seconds for iteration in timed],
        num_tokens=sum(iteration.num_tokens for iteration in timed),
        rewards=[iteration.mean_reward for iteration in timed],
        accuracy=accuracy,
        parts={
            "generate": statistics.mean(i.generate_seconds for i in timed),
            "score + update": statistics.mean(i.seconds - i.generate_seconds for i in timed),
        },
    )


def run_trl(run: FinishedRun, folder: Path) -> list[TrlIteration]:
    """TRL in a process of its own, from the policy of the run's iteration 0."""
    folder.mkdir()
    (folder / "config.json").write_text(run.config.model_dump_json())
    save_pretrained(run.config, dict(open_learner(run, checkpoint_at(run, 0)).weights()), folder / "model")
    log = folder / "trl.log"
    with open(log, "wb") as output:
        command = [sys.executable, str(Path(__file__).with_name("trl_grpo.py")), str(folder)]
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        sys.exit(f"TRL ended with {ended.returncode}:\n{log.read_text()[-2000:]}")
    return [TrlIteration.model_validate_json(line) for line in (folder / "iterations.jsonl").read_text().splitlines()]


def check_comparable(config: RunConfig) -> None:
    """Refuse what the TRL side does not repeat; a comparison of different work says nothing."""
    needed = {
        "model.kind=scratch": isinstance(config.model, ScratchModel),
        "algorithm.aggregation=token_mean": config.algorithm.aggregation is Aggregation.TOKEN_MEAN,
        "algorithm.kl_coefficient=0": config.algorithm.kl_coefficient == 0,
        "algorithm.entropy_coefficient=0": config.algorithm.entropy_coefficient == 0,
        "training.optimizer_steps=1": config.training.optimizer_steps == 1,
    }
    for setting, holds in needed.items():
        if not holds:
            sys.exit(f"--set: the TRL side needs {setting}")


def print_header(config: RunConfig, num_timed: int, loads: dict[str, str]) -> None:
    rollout = config.rollout
    print(f"{rollout.num_groups} problems x {rollout.group_size} attempts, up to {rollout.max_new_tokens} tokens each,")
    print(
        f"{config.iterations} updates, seed {config.seed}, {config.cluster.threads_per_device} torch threads on both sides."
    )
    print(f"Timed: {num_timed} iterations; the first {WARM_UP} (warm-up) and the last (where roll evaluates and writes a")
    print("checkpoint, which TRL does not) are left out on both sides. roll: commit to commit, everything included.")
    print("TRL: end of step to end of step. The two ran one after the other: compare them only if the load was the same.")
    for moment, load in loads.items():
        print(f"{moment}: {load}")
    print()


def print_table(ours: Side, theirs: Side, before: float) -> None:
    rows = [
        ("s/iteration, median", *(statistics.median(side.seconds) for side in (ours, theirs)), ".3f"),
        ("s/iteration, mean", *(statistics.mean(side.seconds) for side in (ours, theirs)), ".3f"),
        ("tokens/s", ours.tokens_per_second, theirs.tokens_per_second, ".0f"),
        ("mean reward, timed iterations", *(statistics.mean(side.rewards) for side in (ours, theirs)), ".3f"),
        ("held-out accuracy, before", before, before, ".3f"),
        ("held-out accuracy, after", ours.accuracy, theirs.accuracy, ".3f"),
    ]
    print(f"{'':<32}{ours.name:>10}{theirs.name:>10}{'trl/roll':>10}")
    for label, our_value, their_value, form in rows:
        ratio = their_value / our_value if our_value else float("nan")
        print(f"{label:<32}{our_value:>10{form}}{their_value:>10{form}}{ratio:>10.2f}")
    for side in (ours, theirs):
        parts = ", ".join(f"{part} {1000 * seconds:.0f}" for part, seconds in side.parts.items())
        print(f"{side.name}, mean ms per iteration: {parts}")


def _num_tokens(manifest: Manifest) -> int:
    assert manifest.collected is not None
    return manifest.collected.num_tokens


def compare(options: argparse.Namespace, folder: Path) -> None:
    loads = {"before": machine_load()}
    settings = [f"seed={options.seed}", f"cluster.threads_per_device={options.threads}"]
    run = run_quickstart(folder, [*only_at_the_end(options.iterations), *settings, *options.overrides])
    config = run.config
    check_comparable(config)
    loads["after roll"] = machine_load()
    iterations = run_trl(run, folder / "trl")
    loads["after TRL"] = machine_load()
    torch.set_num_threads(options.threads)
    policies = [dict(open_learner(run, checkpoint_at(run, iteration)).weights()) for iteration in (0, config.iterations)]
    before, ours = (held_out_accuracy(config, weights) for weights in policies)
    trained = AutoModelForCausalLM.from_pretrained(folder / "trl" / "trained", dtype=torch.float32)
    theirs = held_out_accuracy(config, dict(trained.named_parameters()))
    roll, trl = roll_side(run, ours), trl_side(iterations, theirs)
    print_header(config, len(roll.seconds), loads)
    print_table(roll, trl, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="torch threads on both sides")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="passed to roll")
    options = parser.parse_args()
    disable_progress_bar()
    if options.iterations < WARM_UP + 3:
        parser.error(f"--iterations must be at least {WARM_UP + 3}: {WARM_UP} warm up and the last is not timed")
    with tempfile.TemporaryDirectory(prefix="grpo-vs-trl-") as folder:
        compare(options, Path(folder))


if __name__ == "__main__":
    main()
