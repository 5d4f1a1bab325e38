"""Runs of the command `roll run`, and the times in their manifests, for other benchmarks. Not a program.

The times include everything that a user gets: Prefect, Ray, the store, MLflow, one process per role.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from roll_core.config.run import RunConfig
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, read_chain, read_config
from roll_core.types.manifest import Manifest

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "configs" / "runs" / "quickstart.yaml"
WARM_UP = 2
"""Iterations left out at the start: allocators, caches and lazily imported modules settle in them."""


@dataclass(frozen=True)
class FinishedRun:
    """Run that reached its last iteration; `chain` begins with iteration 0, the warm-started policy."""

    store: ObjectStore
    config: RunConfig
    chain: list[Manifest]


@dataclass(frozen=True)
class TimedIteration:
    """Iteration with its whole duration: `seconds` is the time from the commit before it to its own commit.

    `timings["wall"]` of a manifest excludes the write of the manifest before it; the difference is `commit_seconds`.
    """

    manifest: Manifest
    seconds: float

    @property
    def commit_seconds(self) -> float:
        return self.seconds - self.manifest.timings["wall"]


def run_quickstart(folder: Path, overrides: Sequence[str]) -> FinishedRun:
    """Run the quickstart with `roll run`, with its data in `folder`; `overrides` are KEY=VALUE as for --set."""
    return run_config(QUICKSTART, folder, overrides)


def run_config(config: Path, folder: Path, overrides: Sequence[str]) -> FinishedRun:
    """Run a config with `roll run` by the code of this repository, with its data in `folder`; exit if it fails."""
    command = [sys.executable, "-m", "flows.cli", "run", str(config.resolve())]
    command += [part for override in overrides for part in ("--set", override)]
    python_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    log = folder / "roll.log"
    with open(log, "wb") as output:
        environment = os.environ | {"PYTHONPATH": python_path}
        ended = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        sys.exit(f"roll run ended with {ended.returncode}:\n{log.read_text()[-2000:]}")
    store = ObjectStore(f"file://{folder}/roll-data/store")
    run = find_run(store, next(store.list("runs")))
    return FinishedRun(store, read_config(run), read_chain(store, run.run_id))


def only_at_the_end(iterations: int) -> list[str]:
    """Overrides that move evaluation and checkpoint into the last iteration, which `timed_iterations` leaves out."""
    return [f"iterations={iterations}", f"evaluation.every={iterations}", f"checkpoint.every={iterations}"]


def timed_iterations(chain: Sequence[Manifest]) -> list[TimedIteration]:
    """Iterations with their durations, without the first `WARM_UP` and the last."""
    commits = [datetime.fromisoformat(manifest.committed_at) for manifest in chain]
    seconds = [(later - earlier).total_seconds() for earlier, later in pairwise(commits)]
    timed = [TimedIteration(manifest, s) for manifest, s in zip(chain[1:], seconds, strict=True)]
    return timed[WARM_UP:-1]


def machine_load() -> str:
    """Load averages of this machine. Example: load average 0.42 (1 min), 0.61 (5 min) on 2 cores"""
    one, five, _ = os.getloadavg()
    return f"load average {one:.2f} (1 min), {five:.2f} (5 min) on {os.cpu_count()} cores"
