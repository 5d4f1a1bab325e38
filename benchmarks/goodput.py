"""CPU seconds to read the stage logs of a run and to compute its goodput, by the number of iterations.

    python -m benchmarks.goodput [--iterations 250 500 1000 5000]

Needs a CPU. Writes the stage log of one leg, with five stages (ten lines) per iteration, into a temporary folder. A leg
computes the goodput of its run at every evaluation, in a thread beside training.
"""

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from roll_core.reporting.goodput import commits_in_logs, goodput_metrics, leg_histories
from roll_core.reporting.stage_log import FILE_NAME, Edge, StageEvent, read_stages_by_leg

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
STAGES = ("collect", "prepare", "update", "publish", "commit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, nargs="+", default=[250, 500, 1000, 5000])
    options = parser.parse_args()
    print(f"{'iterations':>10} {'read':>8} {'compute':>8}   CPU seconds")
    for iterations in options.iterations:
        with tempfile.TemporaryDirectory() as folder:
            write_log(Path(folder), iterations)
            read, computed = measure(Path(folder))
        print(f"{iterations:>10} {read:>8.2f} {computed:>8.2f}", flush=True)
    return 0


def write_log(folder: Path, iterations: int) -> None:
    """Write the stage log of a leg: half a second between two lines."""
    names = [f"{stage} {iteration}" for iteration in range(1, iterations + 1) for stage in STAGES]
    edges = [(name, edge) for name in names for edge in (Edge.BEGIN, Edge.END)]
    lines = [
        StageEvent(name=name, edge=edge, at=NOON + timedelta(seconds=0.5 * number)).model_dump_json() + "\n"
        for number, (name, edge) in enumerate(edges)
    ]
    (folder / "leg-1").mkdir()
    (folder / "leg-1" / FILE_NAME).write_text("".join(lines))


def measure(folder: Path) -> tuple[float, float]:
    """CPU seconds to read the logs in a folder, and to compute the goodput from them."""
    start = time.process_time()
    events = read_stages_by_leg(folder)
    read = time.process_time()
    goodput_metrics(leg_histories(events, commits_in_logs(events)))
    return read - start, time.process_time() - read


if __name__ == "__main__":
    sys.exit(main())
