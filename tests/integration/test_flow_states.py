"""States that tell the truth: Prefect after Ctrl-C, SIGTERM and SIGKILL of a command, and a finished run that is resumed."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import prefect
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import flow_runs
from tasks.services import SPOOL
from tests.integration.conftest import REHEARSED, ROLL, TRACKED, Workspace, settings, upload_once
from tests.support import ROOT, patience, wait_until

HOLDER = """
import sys, time
from pathlib import Path
from prefect import flow
import prefect.runtime
from flows.flow_runs import ON_END, hold_flow_run

@flow(**ON_END)
def held(folder: str) -> None:
    hold_flow_run(Path(folder))
    print(prefect.runtime.flow_run.id, flush=True)
    sys.stdin.readline()

held(sys.argv[1])
"""
"""Program that holds the lock of a flow run until a line is written to it."""


@pytest.fixture
def api(workspace: Workspace):
    with temporary_settings({PREFECT_API_URL: workspace.environment["PREFECT_API_URL"]}):
        yield


def start_holder(workspace: Workspace, folder: Path) -> tuple[subprocess.Popen[str], uuid.UUID]:
    environment = workspace.environment | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, uuid.UUID(process.stdout.readline().strip())


def state_of(flow_run_id: uuid.UUID) -> str:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id).state.name


def test_only_the_flow_run_of_a_dead_process_is_marked_as_crashed(workspace, api, monkeypatch):
    work_dir = workspace.folder / "work"
    killed, dead = start_holder(workspace, work_dir / "tiny-1")
    alive, live = start_holder(workspace, work_dir / "tiny-2")
    killed.kill()
    killed.wait()
    monkeypatch.setenv("PREFECT_API_URL", workspace.environment["PREFECT_API_URL"])
    flow_runs.crash_dead_if_served({str(work_dir)})
    assert (state_of(dead), state_of(live)) == ("Crashed", "Running")
    assert [path.name for path in work_dir.glob("*/flow-runs/*")] == [str(live)]

    alive.communicate("\n", timeout=patience(60))
    assert alive.returncode == 0
    assert state_of(live) == "Completed"
    assert not list(work_dir.glob("*/flow-runs/*"))


def test_a_flow_run_of_another_server_keeps_its_lock(workspace, api):
    lock = workspace.folder / "work/tiny-1/flow-runs" / str(uuid.uuid4())
    lock.parent.mkdir(parents=True)
    lock.touch()
    (lock.parent / ".DS_Store").touch()
    flow_runs.crash_dead_flow_runs(workspace.folder / "work")
    assert lock.exists()


@pytest.mark.exhaustive
def test_sigterm_says_how_to_go_on_and_leaves_no_running_flow_run(workspace):
    long = settings(*REHEARSED, "iterations=500", "inference.seconds_per_token=0.3")
    process = workspace.start("run", str(workspace.config), *long)
    workspace.wait_for_iteration(1)
    assert workspace.flow_states() == ["Running", "Running"]
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=patience(120))
    assert process.returncode == 143, output
    assert "roll resume tiny-1" in output
    assert "Traceback" not in output
    assert set(workspace.flow_states()) <= {"Crashed", "Cancelled"}


def test_the_flow_run_and_the_leg_of_a_killed_command_are_crashed_at_the_next_look(workspace, api, monkeypatch):
    long = settings(*REHEARSED, "iterations=500", "inference.seconds_per_token=0.3")
    process = workspace.start("run", str(workspace.config), *long)
    workspace.wait_for_iteration(1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=patience(60))
    monkeypatch.setenv("PREFECT_API_URL", workspace.environment["PREFECT_API_URL"])

    def is_settled() -> bool:
        workspace.printed("show", "tiny-1")
        return workspace.flow_states() == ["Crashed", "Crashed"]

    wait_until(is_settled, "the leg has died with its command, and a look says so")


def test_resume_of_a_finished_run_starts_nothing_and_changes_nothing(workspace, tracked, monkeypatch):
    tracked(workspace)
    workspace.train(*REHEARSED, TRACKED, "checkpoint.export_at_end=false")
    upload_once(workspace.folder / "roll-data/work/tiny-1" / SPOOL)  # what a slow machine has left for later
    before = {path: path.stat().st_mtime_ns for path in workspace.folder.rglob("*")}
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # a server that would fail to be reached
    assert workspace.printed("resume", "tiny-1") == "tiny-1 is finished: 3 iterations\n"
    assert {path: path.stat().st_mtime_ns for path in workspace.folder.rglob("*")} == before


class Overloaded(BaseHTTPRequestHandler):
    """Prefect server that is healthy, knows its version, and answers every other request with 503, as one does whose
    database is locked."""

    def do_GET(self) -> None:
        self._reply(200 if self.path.endswith(("/health", "/version")) else 503)

    def do_POST(self) -> None:
        self._reply(503)

    def _reply(self, status: int) -> None:
        body = json.dumps(prefect.__version__).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def overloaded() -> Iterator[str]:
    """Address of an overloaded Prefect server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Overloaded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


@pytest.mark.parametrize("command", ["run", pytest.param("nightly", marks=pytest.mark.exhaustive)])
def test_a_prefect_server_that_stays_overloaded_is_reported_in_one_sentence(workspace, overloaded, command):
    nights = workspace.folder / "nightly.yaml"
    nights.write_text(f"references: [{{config: {workspace.config}}}]\n")
    done = subprocess.run(
        [ROLL, command, str(nights if command == "nightly" else workspace.config)],
        cwd=workspace.folder,
        env=workspace.environment | {"PREFECT_API_URL": overloaded, "PREFECT_CLIENT_MAX_RETRIES": "0"},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 1
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("roll: ")]
    assert "the Prefect server does not answer as it should (PrefectHTTPStatusError: Server error '503" in sentence
    assert "Traceback" not in done.stdout + done.stderr
