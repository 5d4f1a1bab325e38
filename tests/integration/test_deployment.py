"""`roll up` and `prefect deployment run`: a real Prefect server, a worker, and legs that are jobs of a real SLURM."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.prefect_server import free_port
from tests.integration.conftest import REHEARSED
from tests.support import ROOT, patience, wait_until

OVERRIDES = [
    *REHEARSED,
    "iterations=2",
    "warm_start.steps=5",
    "rollout={num_groups: 4, group_size: 4, max_new_tokens: 8}",
    "evaluation={every: 2, num_problems: 8}",
    "legs.launcher={kind: slurm, partition: low, exclusive: false, cpus_per_node: 2, memory_gigabytes: 2}",
]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as page:
            return page.status == 200
    except OSError:
        return False


def read_until(process: subprocess.Popen[str], last_line: str) -> str:
    """Read the output of the process up to `last_line`; fail if the process ends without it."""
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.rstrip() == last_line:
            return "".join(printed)
    raise AssertionError(f"the process ended before it printed {last_line!r}:\n{''.join(printed)}")


async def read_server(api_url: str) -> tuple[set[str], dict[str, str], list[str]]:
    """Deployment names, flow runs by name with their state, and task-run names."""
    with temporary_settings({PREFECT_API_URL: api_url}):
        async with get_client() as client:
            deployments = {d.name for d in await client.read_deployments()}
            flow_runs = {r.name: r for r in await client.read_flow_runs()}
            task_runs = [t.name for t in await client.read_task_runs()]
    assert "quickstart" in flow_runs
    leg = flow_runs["quickstart-1 leg 1"]
    assert leg.parent_task_run_id is not None, "the leg is not shown as part of the run that launched it"
    return deployments, {name: run.state_name for name, run in flow_runs.items()}, task_runs


def test_a_deployment_runs_on_a_worker_and_shows_every_stage(workspace, slurm, prefect_database):
    for name in ("flows", "tasks", "roll_core", "infra", "configs", "prefect.yaml"):
        (workspace.folder / name).symlink_to(ROOT / name)
    del workspace.environment["PREFECT_API_URL"]
    home = workspace.folder / "prefect-home"  # of a server that has seen no other run
    home.mkdir()
    shutil.copyfile(prefect_database, home / "prefect.db")
    workspace.environment["PREFECT_HOME"] = str(home)
    workspace.environment |= slurm.environment
    prefect_port, mlflow_port = free_port(), free_port()
    api_url = f"http://127.0.0.1:{prefect_port}/api"
    up = workspace.start("up", "--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port))
    try:
        printed = read_until(up, "stop with Ctrl-C")
        assert f"PREFECT_API_URL={api_url} prefect deployment run rlvr/quickstart" in printed
        wait_until(lambda: answers(f"http://127.0.0.1:{mlflow_port}"), "the MLflow page answers")
        command = [sys.executable, "-m", "prefect", "deployment", "run", "rlvr/quickstart", "--watch"]
        watched = subprocess.run(
            [*command, "--param", f"overrides={json.dumps(OVERRIDES)}"],
            env=workspace.environment | {"PREFECT_API_URL": api_url},
            capture_output=True,
            text=True,
            timeout=patience(300),
            check=False,
        )
        assert watched.returncode == 0, watched.stdout + watched.stderr
        chain = workspace.chain("quickstart-1")
        assert [m.iteration for m in chain] == [0, 1, 2]
        expected = {"collect 1", "prepare 1", "update 1", "publish 1", "commit 1", "evaluate 2", "checkpoint 2", "commit 2"}
        wait_until(
            lambda: expected <= set(asyncio.run(read_server(api_url))[2]), "every stage is on the Prefect server", 30.0
        )
        deployments, flow_runs, _ = asyncio.run(read_server(api_url))
        assert deployments == {"quickstart", "qwen3-moe", "regression"}
        assert set(flow_runs.values()) == {"Completed"}
        assert up.poll() is None
    finally:
        os.kill(up.pid, signal.SIGINT)
        output, _ = up.communicate(timeout=patience(180))
    assert up.returncode == 0, output
