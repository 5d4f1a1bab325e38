"""Real runs: the `roll` command in a folder of its own, with a real Prefect, Ray, store and MLflow behind it."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows import cli
from flows.prefect_server import QUIET, embedded_server
from roll_core.errors import UserError
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_of
from roll_core.store.records.runs import read_chain
from roll_core.types.manifest import Manifest
from roll_core.types.refs import CheckpointRef
from tests.support import ROOT

ROLL = str(Path(sys.executable).parent / "roll")
TINY_RUN = """
extends: {root}/configs/clusters/laptop.yaml
name: tiny
iterations: 3
model: {{kind: scratch, max_positions: 32}}
problems: {{kind: arithmetic, puzzle: sort, digits: 3}}
reward: {{kind: exact_match, partial_credit: 0.5}}
warm_start: {{steps: 10}}
rollout: {{num_groups: 4, group_size: 4, max_new_tokens: 5}}
training: {{optimizer: {{learning_rate: 1.0e-3}}}}
evaluation: {{every: 2, num_problems: 8}}
checkpoint: {{every: 3}}
tracking: {{uri: "{tracking}"}}
"""

MLFLOW_DATABASE = "mlflow.db"
REHEARSED = ("--set", "inference={kind: rehearsal, seconds_per_token: 0.02, median_tokens: 5, sigma: 0}")
"""Random tokens from an engine without a model, which starts sooner: for what does not depend on tokens."""


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 180.0) -> None:
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at, f"after {deadline_s:.0f} s still waiting until {what}"
        time.sleep(0.05)


class Workspace:
    """A folder in which commands run, as a user's would."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder = folder
        self.environment = environment
        self.config = folder / "tiny.yaml"
        self.tracking = f"sqlite:///{folder}/{MLFLOW_DATABASE}"
        self.config.write_text(TINY_RUN.format(root=ROOT, tracking=self.tracking))
        self._newest: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`roll ARGUMENTS` in a process group of its own, so that signals can be sent as a terminal does."""
        return self._start([ROLL, *arguments], self.environment)

    def start_with(self, fault: str, *arguments: str) -> subprocess.Popen[str]:
        """The same, with roles that note what they generate, and fail as told."""
        return self.start_module("tests.integration.faulty_roles", fault, *arguments)

    def start_module(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """Start `python -m MODULE ARGUMENTS`; the module may be one of the tests'."""
        command = [sys.executable, "-m", module, *arguments]
        return self._start(command, self.environment | {"PYTHONPATH": str(ROOT)})

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        self._newest = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # Whoever starts tests in the background of a shell makes them, and their children, deaf to Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return self._newest

    def roll(self, *arguments: str, deadline_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; stdout and stderr together."""
        return self._finish(self.start(*arguments), deadline_s)

    def refused(self, *arguments: str) -> str:
        """The one line of a command that refuses what it is asked, before it starts anything: in this process, which has
        imported what it needs."""
        said = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            assert cli.main(arguments) == UserError.exit_code, said.getvalue()
        (line,) = said.getvalue().splitlines()
        assert line.startswith("roll: ")
        return line

    def roll_with(self, fault: str, *arguments: str, deadline_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        return self._finish(self.start_with(fault, *arguments), deadline_s)

    def run_module(self, module: str, *arguments: str, deadline_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run `python -m MODULE ARGUMENTS` to its end; stdout and stderr together."""
        return self._finish(self.start_module(module, *arguments), deadline_s)

    def _finish(self, process: subprocess.Popen[str], deadline_s: float) -> subprocess.CompletedProcess[str]:
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(f"file://{self.folder}/roll-data/store")

    def seeds_generated(self) -> list[str]:
        """Of every attempt that roles were asked for so far that note it; the note begins anew."""
        file = self.folder / "generated.txt"
        seeds = file.read_text().split()
        file.unlink()
        return seeds

    def chain(self, run_id: str = "tiny-1") -> list[Manifest]:
        return read_chain(self.store, run_id)

    def checkpoints(self, run_id: str = "tiny-1") -> list[CheckpointRef]:
        return checkpoints_of(self.store, self.chain(run_id))

    def wait_for_iteration(self, iteration: int, run_id: str = "tiny-1", deadline_s: float = 180.0) -> None:
        manifest = self.folder / f"roll-data/store/runs/{run_id}/iterations/{iteration:08d}.json"
        self.wait_until(manifest.exists, f"iteration {iteration} of {run_id} is committed", deadline_s)

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """In vain, as soon as the last command that was started has failed."""
        newest = self._newest

        def come_true() -> bool:
            failed = newest is not None and (newest.poll() or 0) > 0
            if failed and newest is not None and not condition():
                pytest.fail(f"before {what}, a command ended with {newest.returncode}:\n{newest.communicate()[0]}")
            return condition()

        wait_until(come_true, what, deadline_s)

    def pid_of(self, role: str, leg: int = 1, run_id: str = "tiny-1") -> int:
        return json.loads((self.folder / f"roll-data/work/{run_id}/leg-{leg}/processes.json").read_text())[role]


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory) -> Path:
    """One Prefect database for all tests: creating it is what takes long."""
    return tmp_path_factory.mktemp("prefect-home")


@pytest.fixture(scope="session")
def newcomer(prefect_home) -> dict[str, str]:
    """The environment of somebody who has set up nothing: every command has a Prefect server of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "RAY_"))}
    return environment | {"PREFECT_HOME": str(prefect_home), "COLUMNS": "160"}


@pytest.fixture(scope="session")
def prefect_server(newcomer, prefect_home) -> Iterator[str]:
    """The address of one that is there for all commands: to start one takes a fifth of a short run."""
    with embedded_server(prefect_home, newcomer | QUIET) as url:
        yield url


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory) -> Path:
    """One that nobody has logged to: making its tables takes longer than all that a short run logs."""
    database = tmp_path_factory.mktemp("mlflow") / MLFLOW_DATABASE
    MlflowClient(f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture(scope="session")
def new_workspace(tmp_path_factory, newcomer, prefect_server, mlflow_database) -> Callable[[str], Workspace]:
    """For runs that several tests look at."""

    def make(name: str) -> Workspace:
        folder = tmp_path_factory.mktemp(name)
        shutil.copyfile(mlflow_database, folder / MLFLOW_DATABASE)
        return Workspace(folder, newcomer | QUIET | {"PREFECT_API_URL": prefect_server})

    return make


@pytest.fixture
def workspace(new_workspace) -> Workspace:
    return new_workspace("workspace")
