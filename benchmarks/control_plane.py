"""Overhead of one iteration of the quickstart beyond its model work: Prefect, Ray, store, commit and tracking.

    python -m benchmarks.control_plane [--iterations 12] [--threads 2]

Needs a CPU only. Runs `roll run`, then repeats the same iterations in this process as model work alone (without Ray,
Prefect, store and MLflow), then times no-op tasks of both kinds against an embedded Prefect server. Prints median and p90,
in milliseconds per iteration, of: the iteration from commit to commit, its model work, the difference by stage, and
Prefect's part of it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.in_process import ModelWork, replay_model_work
from benchmarks.roll_runs import WARM_UP, TimedIteration, machine_load, only_at_the_end, run_quickstart, timed_iterations
from flows.prefect_server import prefect_api
from roll_core.config.operations.services import RetriesConfig
from roll_core.reporting.stage_log import StageLog
from roll_core.types.manifest import Receipt

TARGET_MS = 500.0
"""Most milliseconds that one iteration may take beyond its model work."""
NO_OP_ITERATIONS = 25
PURE_TASKS, STATE_CHANGING_TASKS = 2, 3
"""Number of tasks, by kind, of an iteration without evaluation and checkpoint: collect, prepare; update, publish, commit."""

NO_SERVICES = SimpleNamespace(
    config=SimpleNamespace(retries=RetriesConfig()), stage_log=StageLog(Path(tempfile.mkdtemp(prefix="roll-stages-")))
)
"""Stand-in for a leg's services; a no-op task needs retries and the stage log only."""

Rows = dict[str, list[float]]
"""Milliseconds of each iteration (or of each task), by the label of the printed row."""


def overhead_rows(timed: Sequence[TimedIteration], work: Sequence[ModelWork]) -> Rows:
    """Milliseconds of the iteration, its model work, and the difference. Indented rows split the difference by stage."""
    pairs = list(zip(timed, work, strict=True))
    return {
        "iteration, commit to commit": [1000 * t.seconds for t, _ in pairs],
        "model work": [1000 * w.total for _, w in pairs],
        "outside model work": [1000 * (t.seconds - w.total) for t, w in pairs],
        "  collect, beyond its model work": _beyond_model_work(pairs, "collect", lambda w: w.collect),
        "  prepare, beyond its model work": _beyond_model_work(pairs, "prepare", lambda w: w.prepare),
        "  update, beyond its model work": _beyond_model_work(pairs, "update", lambda w: w.update),
        "  publish, beyond its model work": _beyond_model_work(pairs, "publish", lambda w: w.publish),
        "  between stages": [1000 * _between_stages(t) for t, _ in pairs],
        "  writing the manifest": [1000 * t.commit_seconds for t, _ in pairs],
    }


def _beyond_model_work(
    pairs: Sequence[tuple[TimedIteration, ModelWork]], stage: str, model_work: Callable[[ModelWork], float]
) -> list[float]:
    return [1000 * (t.manifest.timings[stage] - model_work(w)) for t, w in pairs]


def _between_stages(iteration: TimedIteration) -> float:
    timings = iteration.manifest.timings
    return timings["wall"] - sum(seconds for stage, seconds in timings.items() if stage != "wall")


def prefect_rows(folder: Path) -> Rows:
    """Milliseconds of no-op tasks of both kinds, run as a leg runs its stages, and of all tasks of an iteration."""
    with prefect_api(folder):
        # Prefect reads its settings on import, so import it only when the server is up.
        from prefect import flow

        from tasks.durability import pure, state_changing

        keep = pure("pure {number}")(no_op)
        change = state_changing("state changing {number}")(no_op)

        @flow(name="no-ops", result_storage=folder / "stage-cache")
        def no_ops() -> list[tuple[list[float], list[float]]]:
            return [
                (call_times(keep, PURE_TASKS, round_number), call_times(change, STATE_CHANGING_TASKS, round_number))
                for round_number in range(WARM_UP + NO_OP_ITERATIONS)
            ]

        rounds = no_ops()[WARM_UP:]
    return {
        "one PURE task": [ms for pure_ms, _ in rounds for ms in pure_ms],
        "one STATE_CHANGING task": [ms for _, state_changing_ms in rounds for ms in state_changing_ms],
        f"an iteration's {PURE_TASKS} + {STATE_CHANGING_TASKS} tasks": [sum(p) + sum(s) for p, s in rounds],
    }


def no_op(number: int, services: SimpleNamespace) -> Receipt:  # noqa: ARG001
    return Receipt(metrics={"number": number})


def call_times(task: Callable[[int, SimpleNamespace], Receipt], count: int, round_number: int) -> list[float]:
    """Milliseconds of each call. Every call has its own input, so that none returns a cached result."""
    milliseconds = []
    for number in range(count * round_number, count * (round_number + 1)):
        start = time.perf_counter()
        task(number, NO_SERVICES)
        milliseconds.append(1000 * (time.perf_counter() - start))
    return milliseconds


def print_rows(title: str, rows: Rows) -> None:
    print(f"{title:<42}{'median':>9}{'p90':>9}")
    for label, values in rows.items():
        p90 = statistics.quantiles(values, n=10, method="inclusive")[-1]
        print(f"{label:<42}{statistics.median(values):>9.1f}{p90:>9.1f}")
    print()


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run the quickstart, repeat its model work, time Prefect, and print all tables."""
    load_before = machine_load()
    threads = f"cluster.threads_per_device={options.threads}"
    run = run_quickstart(folder, [*only_at_the_end(options.iterations), threads])
    torch.set_num_threads(options.threads)
    timed = timed_iterations(run.chain)
    work = replay_model_work(run, run.chain[1:])[WARM_UP:-1]
    overhead = overhead_rows(timed, work)
    print(
        f"Timed: {len(timed)} of {options.iterations} iterations; the first {WARM_UP} (warm-up) and the last (evaluation and"
    )
    print("checkpoint) are left out. Model work: the same iterations again in one process, with no other part of the system")
    print("running. A stage beyond its model work: Ray, serialization, store, and core time that other processes took. The")
    print("two were measured one after the other, so a change in the machine's load is in the difference.")
    print(f"Before: {load_before}; after: {machine_load()}.\n")
    print_rows("milliseconds per iteration", overhead)
    print_rows("Prefect alone, milliseconds", prefect_rows(folder))
    median = statistics.median(overhead["outside model work"])
    print(f"target {TARGET_MS:.0f} ms outside model work: {'met' if median <= TARGET_MS else 'not met'} ({median:.0f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of the roles and of the replay")
    options = parser.parse_args()
    if options.iterations < WARM_UP + 3:
        parser.error(f"--iterations must be at least {WARM_UP + 3}: {WARM_UP} warm up and the last is not timed")
    with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
