"""`roll up`: a Prefect server with the deployments of prefect.yaml, a worker, and the MLflow page, for a person to look."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from flows.prefect_server import background_process, wait_until_healthy
from roll_core.errors import RollError, UserError

POOL = "roll"


def bring_up(prefect_port: int, mlflow_port: int, tracking_uri: str) -> int:
    """Start everything, say where it is, stay until Ctrl-C or until one of the processes ends."""
    _check_free("--prefect-port", prefect_port)
    _check_free("--mlflow-port", mlflow_port)
    if not Path("prefect.yaml").is_file():
        raise UserError("roll up: no prefect.yaml here: run it in the project's folder")
    log_dir = Path("roll-data/up").absolute()
    log_dir.mkdir(parents=True, exist_ok=True)
    api_url = f"http://127.0.0.1:{prefect_port}/api"
    environment = os.environ | {
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PWD": str(Path.cwd()),
    }
    prefect = [sys.executable, "-m", "prefect"]
    mlflow = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", tracking_uri, "--port", str(mlflow_port)]
    with contextlib.ExitStack() as stack:
        server = [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)]
        processes = {
            "prefect server": stack.enter_context(background_process(server, environment, log_dir / "prefect-server.log"))
        }
        wait_until_healthy(processes["prefect server"], api_url, log_dir / "prefect-server.log")
        _run(
            [*prefect, "work-pool", "create", POOL, "--type", "process", "--overwrite"], environment, log_dir / "deploy.log"
        )
        _run([*prefect, "--no-prompt", "deploy", "--all"], environment, log_dir / "deploy.log")
        worker = [*prefect, "worker", "start", "--pool", POOL]
        processes["prefect worker"] = stack.enter_context(background_process(worker, environment, log_dir / "worker.log"))
        processes["mlflow"] = stack.enter_context(background_process(mlflow, environment, log_dir / "mlflow.log"))
        print(f"prefect  http://127.0.0.1:{prefect_port}")
        print(f"mlflow   http://127.0.0.1:{mlflow_port}")
        print(f"run      PREFECT_API_URL={api_url} prefect deployment run rlvr/quickstart")
        print(f"logs     {log_dir}")
        print("stop with Ctrl-C", flush=True)
        try:
            return _stay(processes, log_dir)
        finally:
            for process in processes.values():  # all at once: each takes its seconds to end
                process.terminate()


def _check_free(option: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise UserError(f"{option}: port {port} is in use: stop what uses it, or give another {option}") from None


def _run(command: list[str], environment: dict[str, str], log_file: Path) -> None:
    with open(log_file, "ab") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RollError(f"'{' '.join(command[2:])}' failed; its log is {log_file}")


def _stay(processes: dict[str, subprocess.Popen[bytes]], log_dir: Path) -> int:
    try:
        while True:
            for name, process in processes.items():
                if process.poll() is not None:
                    raise RollError(f"{name} ended with code {process.returncode}; its log is in {log_dir}")
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
