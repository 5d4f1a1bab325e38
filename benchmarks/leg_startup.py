"""What passes between the start of a SLURM job and the first iteration of its leg.

    python -m benchmarks.leg_startup [--nodes 2] [--own-server]

As root, where `make setup-test` was: starts a SLURM on this machine and a Prefect server, runs a tiny config in two legs,
and prints what the second one, which finds everything warm, spends on what before its first iteration begins. With
--own-server legs do not reach that server, as on a site whose compute nodes see nothing else, and start one each.
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
from tests.support import ROOT

CONFIG = """
extends: {root}/configs/clusters/laptop.yaml
name: startup
iterations: 2
model: {{kind: scratch, max_positions: 32}}
problems: {{kind: arithmetic, puzzle: sort, digits: 3}}
reward: {{kind: exact_match}}
rollout: {{num_groups: 4, group_size: 4, max_new_tokens: 5}}
evaluation: {{num_problems: 8}}
cluster: {{nodes: {nodes}, devices_per_node: 1, threads_per_device: 1}}
placement: {{trainer: [0], engines: [{last}]}}
legs:
  launcher: {{kind: slurm, exclusive: false, cpus_per_node: 2, memory_gigabytes: 2}}
"""

TARGET_S = 10.0
"""Most that may pass before roles are asked for, on two cores, where everything is warm."""
ROLES = "Ray's other nodes, roles, models"


def edge(events: Sequence[StageEvent], name: str, which: Edge) -> datetime:
    return next(event.at for event in events if event.name == name and event.edge is which)


def breakdown(started_at: datetime, events: Sequence[StageEvent]) -> dict[str, float]:
    """Seconds by what the leg's driver spends them on, or waits for, in order.

    Ray's head and the Prefect server start while the driver imports what it needs: only what it waits for them beyond that
    has rows of its own.
    """
    has_server = any(event.name == "prefect" for event in events)
    marks = {f"job's processes, imports{'' if has_server else ', flow'}": started_at}
    if has_server:
        marks["waiting for its Prefect server"] = edge(events, "prefect", Edge.BEGIN)
        marks["flow"] = edge(events, "prefect", Edge.END)
    marks |= {
        "waiting for Ray's head": edge(events, "start", Edge.BEGIN),
        ROLES: edge(events, "ray", Edge.END),
        "first policy": edge(events, "start", Edge.END),
        "": edge(events, "collect 1", Edge.BEGIN),
    }
    names, times = list(marks), list(marks.values())
    return {name: (end - begin).total_seconds() for name, begin, end in zip(names, times, times[1:], strict=False)}


def control_plane_s(rows: dict[str, float]) -> float:
    """All that passes before roles are asked for."""
    return sum(list(rows.values())[: list(rows).index(ROLES)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--own-server", action="store_true", help="legs do not reach the Prefect server of the run")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-startup-")))
        os.environ |= stack.enter_context(SlurmCluster(folder / "slurm")).environment
        if not options.own_server:
            home = {"PREFECT_HOME": str(folder / "prefect")}
            os.environ["PREFECT_API_URL"] = stack.enter_context(
                embedded_server(folder / "prefect", os.environ | QUIET | home)
            )
        config = folder / "startup.yaml"
        config.write_text(CONFIG.format(root=ROOT, nodes=options.nodes, last=options.nodes - 1))
        for _ in range(2):
            subprocess.run([sys.executable, "-m", "flows.cli", "run", config], cwd=folder, check=True, env=_with_code())
        run_dir = folder / "roll-data/work/startup-2"
        job_id = next((run_dir / "leg-1").glob("*_submitted.pkl")).name.partition("_")[0]
        starts_at = job_state(job_id).starts_at
        assert starts_at is not None
        rows = breakdown(datetime.fromtimestamp(starts_at, UTC), read_stages(run_dir))
    print(
        f"from the start of a job of {options.nodes} node(s) to its first iteration, in seconds (SLURM counts whole ones):"
    )
    for label, seconds in rows.items():
        print(f"  {label:<34}{seconds:6.1f}")
    print(f"  {'all':<34}{sum(rows.values()):6.1f}")
    print(f"control plane, all before roles: {control_plane_s(rows):.1f} s (target: under {TARGET_S:.0f} s)")
    return 0


def _with_code() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    sys.exit(main())
