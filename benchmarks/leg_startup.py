"""Seconds between the start of a SLURM job and the first iteration of its leg, step by step.

    python -m benchmarks.leg_startup [--nodes 2] [--own-server]

Needs root and the packages of `make setup-test`. Starts a SLURM cluster and a Prefect server on this machine and runs a tiny
config twice. Prints the steps of the second run's leg, for which files and caches are warm. With --own-server legs cannot
reach that Prefect server, as on a site with isolated compute nodes, and each starts its own.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flows.prefect_server import QUIET, embedded_server
from infra.slurm.queue import job_state
from roll_core.reporting.stage_log import Edge, StageEvent, read_stages
from tests.slurm_cluster import SlurmCluster
from tests.support import ROOT, write_tiny_run

LAUNCHER = {"kind": "slurm", "exclusive": False, "cpus_per_node": 2, "memory_gigabytes": 2}
TARGET_S = 10.0
"""Most seconds before the driver starts roles, on two cores with warm caches."""
ROLES = "Ray's other nodes, roles, models"


def event_time(events: Sequence[StageEvent], name: str, edge: Edge) -> datetime:
    """Time of the first begin, or end, of a stage."""
    return next(event.at for event in events if event.name == name and event.edge is edge)


def breakdown(started_at: datetime, events: Sequence[StageEvent]) -> dict[str, float]:
    """Seconds of each step of the leg's driver, in order.

    Ray's head and the Prefect server start while the driver imports its modules. Their rows are only the seconds that the
    driver waits for them after that.
    """
    has_server = any(event.name == "prefect" for event in events)
    begins = {f"job's processes, imports{'' if has_server else ', flow'}": started_at}
    if has_server:
        begins["waiting for its Prefect server"] = event_time(events, "prefect", Edge.BEGIN)
        begins["flow"] = event_time(events, "prefect", Edge.END)
    begins |= {
        "waiting for Ray's head": event_time(events, "start", Edge.BEGIN),
        ROLES: event_time(events, "ray", Edge.END),
        "first policy": event_time(events, "start", Edge.END),
        "": event_time(events, "collect 1", Edge.BEGIN),
    }
    names, times = list(begins), list(begins.values())
    return {name: (end - begin).total_seconds() for name, begin, end in zip(names, times, times[1:], strict=False)}


def control_plane_s(rows: dict[str, float]) -> float:
    """Seconds before the driver starts roles."""
    return sum(list(rows.values())[: list(rows).index(ROLES)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--own-server", action="store_true", help="legs start their own Prefect server")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-startup-")))
        os.environ |= stack.enter_context(SlurmCluster(folder / "slurm")).environment
        if not options.own_server:
            home = {"PREFECT_HOME": str(folder / "prefect")}
            os.environ["PREFECT_API_URL"] = stack.enter_context(
                embedded_server(folder / "prefect", os.environ | QUIET | home)
            )
        config = write_tiny_run(
            folder / "startup.yaml",
            name="startup",
            iterations=2,
            cluster={"nodes": options.nodes, "devices_per_node": 1, "threads_per_device": 1},
            placement={"trainer": [0], "engines": [options.nodes - 1]},
            legs={"launcher": LAUNCHER},
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        for _ in range(2):
            subprocess.run([sys.executable, "-m", "flows.cli", "run", config], cwd=folder, check=True, env=environment)
        run_dir = folder / "roll-data/work/startup-2"
        job_id = next((run_dir / "leg-1").glob("*_submitted.pkl")).name.partition("_")[0]
        starts_at = job_state(job_id).starts_at
        assert starts_at is not None
        rows = breakdown(datetime.fromtimestamp(starts_at, UTC), read_stages(run_dir))
    print(f"seconds from the start of a job of {options.nodes} node(s) to its first iteration (SLURM rounds the start):")
    for label, seconds in rows.items():
        print(f"  {label:<34}{seconds:6.1f}")
    print(f"  {'total':<34}{sum(rows.values()):6.1f}")
    print(f"control plane, all steps before roles: {control_plane_s(rows):.1f} s (target: under {TARGET_S:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
