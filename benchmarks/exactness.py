"""One update, repeated beside busy processes on several numbers of threads; and what deterministic algorithms cost.

    python -m benchmarks.exactness [--repeats 500] [--threads 1,2,4] [--busy 2] [--groups 32] [--off]

Needs a CPU only. Loads the same checkpoint of the quickstart's model before each repeat, updates policy and critic on the
same random trajectories, and counts the different weights that come out: 1 is exact. With --off
`training.deterministic` is false. Also measures the update with and without deterministic algorithms, alone: CPU seconds of
the cheapest repeat, which depend little on the load of the machine.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.loss_cost import random_trajectories
from benchmarks.roll_runs import REPOSITORY, machine_load
from roll_core.config.load import load_config
from roll_core.config.run import RunConfig
from roll_core.models.determinism import make_deterministic
from roll_core.roles.process import role_environment
from roll_core.training.learner import Learner
from roll_core.weights.digests import WeightsDigest

PPO = REPOSITORY / "configs" / "runs" / "quickstart-ppo.yaml"
"""Config whose update covers the policy and a critic."""
ITERATION = 4
"""Number of the repeated iteration: the first that updates the policy, after the critic's warm-up."""


def update_config(num_groups: int) -> RunConfig:
    """Config of the repeated update: the quickstart's with a critic, and `num_groups` problems that share their prompts."""
    return load_config(str(PPO), [f"rollout.num_groups={num_groups}", "warm_start=null"])


def build_update(config: RunConfig, folder: Path) -> Callable[[], str]:
    """Return a function that repeats one update from the same checkpoint, and returns the digest of the weights."""
    learner = Learner(config, rank=0, device=torch.device("cpu"))
    prepared = learner.prepare(random_trajectories(config), weights_version=0)
    learner.snapshot()(folder)

    def update() -> str:
        learner.load(folder)
        learner.update_critic(prepared, ITERATION)
        metrics = learner.update(prepared, ITERATION)
        assert metrics["update/gradient_norm"] > 0, "nothing was trained"
        digest = WeightsDigest()
        for _ in digest.observe(learner.weights()):
            pass
        return digest.hexdigest()

    return update


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes computing during the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Repeated:
    """Outcome of a repeated update: how often each digest of the weights came out, and CPU seconds of the cheapest update,
    alone, without and with deterministic algorithms."""

    outcomes: Counter[str]
    seconds_off: float
    seconds_on: float


@dataclass(frozen=True)
class Repetition:
    """One measurement: an update, repeated on `num_threads` beside `busy` processes, then timed alone `timed` times."""

    num_threads: int
    repeats: int = 500
    busy: int = 2
    num_groups: int = 32
    deterministic: bool = True
    timed: int = 20


def repeat_update(measured: Repetition) -> Repeated:
    """Repeat an update in a process of its own, in the environment of a role."""
    os.environ |= role_environment()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_repeat_here, measured).result()


def _repeat_here(measured: Repetition) -> Repeated:
    torch.set_num_threads(measured.num_threads)
    with tempfile.TemporaryDirectory() as folder:
        update = build_update(update_config(measured.num_groups), Path(folder))
        seconds_off = _cpu_seconds(update, measured.timed)
        if measured.deterministic:
            make_deterministic()
        with busy_processes(measured.busy):
            outcomes = Counter(update() for _ in range(measured.repeats))
        make_deterministic()
        return Repeated(outcomes, seconds_off, _cpu_seconds(update, measured.timed))


def _cpu_seconds(update: Callable[[], str], repeats: int) -> float:
    """CPU seconds of the cheapest of several updates; 0 without repeats."""
    used = []
    for _ in range(repeats):
        start = time.process_time()
        update()
        used.append(time.process_time() - start)
    return min(used, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--threads", default="1,2,4")
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--off", action="store_true")
    options = parser.parse_args()
    print(machine_load())
    for num_threads in map(int, options.threads.split(",")):
        found = repeat_update(
            Repetition(num_threads, options.repeats, options.busy, options.groups, deterministic=not options.off)
        )
        others = options.repeats - max(found.outcomes.values())
        print(
            f"{num_threads} thread(s): {len(found.outcomes)} different weights, {others} of {options.repeats} repeats differ"
        )
        print(f"  CPU time of an update: {found.seconds_off * 1e3:.0f} ms, deterministic {found.seconds_on * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
