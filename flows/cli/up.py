"""Start a Prefect server with the deployments of prefect.yaml, a worker for them, and the MLflow page.

Prints their addresses and stays until Ctrl-C, or until one of the processes ends.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from flows.cli.options import Commands
from roll_core.errors import RollError, UserError

POOL = "roll"
"""Name of the Prefect work pool whose deployments the worker runs."""


def add(commands: Commands) -> None:
    """Declare `roll up`."""
    parser = commands.add_parser(
        "up", help="start a Prefect server, a worker with the deployments, and the MLflow page", description=__doc__
    )
    parser.add_argument("--prefect-port", type=int, default=4200)
    parser.add_argument("--mlflow-port", type=int, default=5000)
    parser.add_argument("--tracking", default="sqlite:///roll-data/mlflow.db", metavar="URI", help="MLflow tracking address")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Start the processes, print their addresses, and wait for Ctrl-C or for one of them to end."""
    from flows.prefect_server import background_process, wait_until_healthy

    _check_port("--prefect-port", options.prefect_port)
    _check_port("--mlflow-port", options.mlflow_port)
    if not Path("prefect.yaml").is_file():
        raise UserError("roll up: no prefect.yaml here: run it in the project's folder")
    log_dir = Path("roll-data/up").absolute()
    log_dir.mkdir(parents=True, exist_ok=True)
    api_url = f"http://127.0.0.1:{options.prefect_port}/api"
    environment = os.environ | {
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # evaluation jobs of MLflow itself: processes that roll does not use
        "PWD": str(Path.cwd()),
    }
    prefect = [sys.executable, "-m", "prefect"]
    server = [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(options.prefect_port)]
    worker = [*prefect, "worker", "start", "--pool", POOL]
    mlflow = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", options.tracking]
    mlflow += ["--port", str(options.mlflow_port), "--workers", "1"]
    with contextlib.ExitStack() as stack:

        def start(command: list[str], log_name: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(background_process(command, environment, log_dir / log_name))

        processes = {"prefect server": start(server, "prefect-server.log"), "mlflow": start(mlflow, "mlflow.log")}
        wait_until_healthy(processes["prefect server"], api_url, log_dir / "prefect-server.log")
        _run([*prefect, "work-pool", "create", POOL, "--type", "process", "--overwrite"], environment, log_dir)
        _run([*prefect, "--no-prompt", "deploy", "--all"], environment, log_dir)
        processes["prefect worker"] = start(worker, "worker.log")
        print(f"prefect  http://127.0.0.1:{options.prefect_port}")
        print(f"mlflow   http://127.0.0.1:{options.mlflow_port}")
        print(f"run      PREFECT_API_URL={api_url} prefect deployment run rlvr/quickstart")
        print(f"logs     {log_dir}")
        print("stop with Ctrl-C", flush=True)
        try:
            return _wait_for_interrupt(processes, log_dir)
        finally:
            for process in processes.values():  # all at once: each takes seconds to end
                process.terminate()


def _check_port(option: str, port: int) -> None:
    """Raise `UserError` if another process listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise UserError(f"{option}: port {port} is in use: stop what uses it, or give another {option}") from None


def _run(command: list[str], environment: dict[str, str], log_dir: Path) -> None:
    """Run a command to its end, logging to deploy.log; raise `RollError` if it fails."""
    log_file = log_dir / "deploy.log"
    with open(log_file, "ab") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RollError(f"'{' '.join(command[2:])}' failed; its log is {log_file}")


def _wait_for_interrupt(processes: dict[str, subprocess.Popen[bytes]], log_dir: Path) -> int:
    """Return 0 at Ctrl-C; raise `RollError` as soon as one of the processes has ended."""
    try:
        while True:
            for name, process in processes.items():
                if process.poll() is not None:
                    raise RollError(f"{name} ended with code {process.returncode}; its log is in {log_dir}")
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
