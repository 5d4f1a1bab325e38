"""Secrets of a real run: they are in the environment of its processes and in no file, no database, no log and no command
line. Its Ray cluster is reachable from this machine alone."""

import stat
import subprocess
from pathlib import Path

from tests.integration.conftest import REHEARSED, TRACKED, settings
from tests.support import patience

PLANTED = {
    "PREFECT_API_KEY": "planted-prefect-key",
    "AWS_SECRET_ACCESS_KEY": "planted-s3-key",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password",
}
"""Secrets by the environment variable that holds them."""


def command_lines() -> str:
    return subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def listening_addresses(session: int) -> set[str]:
    """Addresses on which the Ray processes below a session's processes listen."""
    sockets = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    below = descendants(session)
    return {
        line.split()[3].rpartition(":")[0] for line in sockets.splitlines() if any(f"pid={pid}," in line for pid in below)
    }


def descendants(pid: int) -> set[int]:
    """Process ids of a process and of all processes below it."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs, found = [tuple(map(int, line.split())) for line in listed.splitlines()], {pid}
    while more := {child for child, parent in pairs if parent in found} - found:
        found |= more
    return found


def files_with(secret: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_planted_secrets_are_in_no_file_and_no_command_line_of_a_run(workspace, tracked):
    tracked(workspace)
    workspace.environment = workspace.environment | PLANTED
    run = workspace.start("run", str(workspace.config), *settings(*REHEARSED, TRACKED, "inference.seconds_per_token=0.3"))
    workspace.wait_for_iteration(0)
    shown, listening = command_lines(), listening_addresses(run.pid)
    output, _ = run.communicate(timeout=patience(300))
    assert run.returncode == 0, output
    for secret in PLANTED.values():
        assert secret not in output
        assert secret not in shown
        assert files_with(secret, workspace.folder) == []
    run_folder = workspace.folder / "roll-data/work/tiny-1"
    assert stat.S_IMODE(run_folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in run_folder.rglob("*_submitted.pkl")} == {0o600}
    assert listening, "nothing of the run listens: nothing is tested"
    assert {address.strip("[]").removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
