"""What a commit costs an iteration, and what a recovery costs by how far back the last checkpoint lies.

    python -m benchmarks.commit [--s3] [--since 1 5 10 20 40]

Runs the quickstart's model and problem, small batches, as `roll resume` does it, with a checkpoint at the start only, and
kills the leg with SIGKILL so many iterations later; then again, and so on. Every leg thus loads the same checkpoint and
makes more and more updates again from stored rollouts. Times are those of the stage log: a stage's begin to its end.
`commit` is everything of it: waiting for rollouts on their way to the store, the manifest, and telling the tracker's spool.
In a folder, or with --s3 in a real S3 server started for the purpose.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from roll_core.config.load import load_config
from roll_core.reporting.stage_log import Edge, StageEvent, read_stages
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import open_run
from tests.chaos.kill_points import RECOVER, KillPoint
from tests.chaos.process_kills import chain_of, finish, kill_during_command, work_folder
from tests.s3_server import S3Server

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "runs" / "quickstart.yaml"
WARM_UP = 2
"""Iterations of the first leg that are left out."""


def seconds_of(events: Sequence[StageEvent]) -> list[tuple[str, float]]:
    """Stages that ended, by name, with how long they took."""
    began: dict[str, datetime] = {}
    took: list[tuple[str, float]] = []
    for event in events:
        if event.edge is Edge.BEGIN:
            began[event.name] = event.at
        elif event.edge is Edge.END:
            took.append((event.name, (event.at - began[event.name]).total_seconds()))
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s3", action="store_true", help="in a bucket of a real S3 server instead of a folder")
    parser.add_argument("--since", type=int, nargs="+", default=[1, 5, 10, 20, 40], help="iterations since the checkpoint")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        uri = f"file://{folder}/store"
        if options.s3:
            server = stack.enter_context(S3Server(folder / "s3"))
            os.environ.update(server.environment)
            uri = server.new_store_uri()
        measure(folder, uri, sorted(options.since))
    return 0


def measure(folder: Path, uri: str, since: Sequence[int]) -> None:
    iterations = since[-1] + 1
    config = load_config(
        str(QUICKSTART),
        [
            f"iterations={iterations}",
            f"checkpoint.every={10 * iterations}",
            "checkpoint.export_at_end=false",
            f"evaluation.every={iterations}",
            "legs.max_failures=0",
            f"store.uri={uri}",
            f"tracking.uri=sqlite:///{folder}/mlflow.db",
            f"work_dir={folder}/work",
        ],
    )
    run = open_run(ObjectStore(uri), config)
    for iteration in since:
        if not kill_during_command(run, [KillPoint(victim="leg", stage="collect", iteration=iteration + 1, delay_s=0.0)]):
            sys.exit(f"the run never came to iteration {iteration + 1}")
    finish(run)
    took = seconds_of(read_stages(work_folder(run)))
    recoveries = [seconds for name, seconds in took if name == RECOVER][1:]  # the first leg's loads what it has just saved
    commits = [seconds for name, seconds in took if name.startswith("commit ")][WARM_UP:]
    walls = [manifest.timings["wall"] for manifest in chain_of(run)[1 + WARM_UP :]]
    print(f"commit, {'S3' if uri.startswith('s3') else 'folder'}, {len(commits)} iterations of the quickstart:")
    tail = statistics.quantiles(commits, n=10)[-1]
    print(f"  {1000 * statistics.median(commits):.0f} ms median, {1000 * tail:.0f} ms p90, ", end="")
    print(f"{statistics.median(commits) / statistics.median(walls):.1%} of an iteration")
    print("recovery, from the checkpoint loaded to the policy published:")
    print(f"  {'iterations since':>16} {'seconds':>8} {'as a share of having run them':>30}")
    for count, seconds in zip(since, recoveries, strict=True):
        print(f"  {count:>16} {seconds:>8.2f} {seconds / (count * statistics.median(walls)):>30.0%}")


if __name__ == "__main__":
    sys.exit(main())
