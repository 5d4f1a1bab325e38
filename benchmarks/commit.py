"""Seconds of a commit, and of a recovery by the number of iterations since the last checkpoint.

    python -m benchmarks.commit [--s3] [--since 1 5 10 20 40]

Needs a CPU; with --s3 also the packages of `make setup-test`. Runs the quickstart with `roll resume` and a checkpoint at
iteration 0 only. Kills each leg with SIGKILL after the next number of iterations of --since. Every leg therefore loads the
same checkpoint and replays more updates from stored rollouts than the leg before. Times come from the stage log. A commit
includes waiting for rollouts that are being uploaded, the manifest, and the event for the tracker's spool. The store is a
folder, or with --s3 a real S3 server started here.
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

from benchmarks.roll_runs import QUICKSTART
from roll_core.config.load import load_config
from roll_core.reporting.stage_log import Edge, StageEvent, read_stages
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import open_run
from tests.chaos.kill_points import RECOVER, KillPoint
from tests.chaos.process_kills import chain_of, finish, kill_during_command, work_folder
from tests.s3_server import S3Server

WARM_UP = 2
"""Iterations of the first leg that are left out."""


def stage_seconds(events: Sequence[StageEvent]) -> list[tuple[str, float]]:
    """Name and seconds of every stage that ended, in order."""
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
    parser.add_argument("--s3", action="store_true", help="store on a real S3 server instead of in a folder")
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
    """Run, kill and resume once per number in `since`; print seconds of commits and recoveries."""
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
    took = stage_seconds(read_stages(work_folder(run)))
    recoveries = [seconds for name, seconds in took if name == RECOVER][1:]  # the first leg has nothing to replay
    commits = [seconds for name, seconds in took if name.startswith("commit ")][WARM_UP:]
    walls = [manifest.timings["wall"] for manifest in chain_of(run)[1 + WARM_UP :]]
    print(f"commit, {'S3' if uri.startswith('s3') else 'folder'}, {len(commits)} iterations of the quickstart:")
    tail = statistics.quantiles(commits, n=10)[-1]
    print(f"  {1000 * statistics.median(commits):.0f} ms median, {1000 * tail:.0f} ms p90, ", end="")
    print(f"{statistics.median(commits) / statistics.median(walls):.1%} of an iteration")
    print("recovery, from the checkpoint loaded to the policy published:")
    print(f"  {'iterations since':>16} {'seconds':>8} {'share of running them':>30}")
    for count, seconds in zip(since, recoveries, strict=True):
        print(f"  {count:>16} {seconds:>8.2f} {seconds / (count * statistics.median(walls)):>30.0%}")


if __name__ == "__main__":
    sys.exit(main())
