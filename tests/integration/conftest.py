"""Real runs: the `roll` command in a folder of its own, with a real Prefect server, Ray, store and MLflow behind it.

Starting a run costs about 40 CPU seconds, nearly all of it imports. Tests that kill neither the command nor the leg's
process therefore train in the test's own process (`Workspace.train`), on a Ray cluster that they share. Where tokens and
weights do not matter, engines and trainer rehearse (`REHEARSED`), which imports no torch.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from flows import cli
from flows.prefect_server import QUIET, SKIP_DATABASE_SETUP, copy_database, embedded_server
from roll_core.config.load import load_config
from roll_core.config.operations.placement import leg_resources
from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.planning.preflight import check_ready, with_teachers_pinned
from roll_core.roles.process import role_environment
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_of
from roll_core.store.records.forks import forked_config
from roll_core.store.records.runs import find_run, open_run, read_chain, read_config
from roll_core.types.leg import LegAllocation, LegEnded, LegEnding
from roll_core.types.manifest import Manifest, Replayed
from roll_core.types.refs import CheckpointRef, RunRef
from tests.support import ROOT, patience, wait_until

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ROLL = str(Path(sys.executable).parent / "roll")
UPLOADER = [sys.executable, "-m", "roll_core.tracking.uploader"]
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
tracking: {{uri: null}}
"""
MLFLOW_DATABASE = "mlflow.db"
TRACKED = f"tracking.uri=sqlite:///{MLFLOW_DATABASE}"
"""Setting of a run that uploads to MLflow; the others do without the uploader's process."""
REHEARSED = (
    "inference={kind: rehearsal, seconds_per_token: 0.02, median_tokens: 5, sigma: 0}",
    "training={backend: rehearsal}",
)
"""Settings of a run without a model: random tokens, and weights that are a digest of what was trained on."""
SHARED_DEVICES = 8
"""Device slots of the shared Ray cluster: the most that a run on it may ask for."""


def settings(*overrides: str) -> list[str]:
    """Command-line arguments that set config keys."""
    return [word for override in overrides for word in ("--set", override)]


class SharedRay:
    """Ray cluster of this test process, started when a run first needs it. Runs on it must not kill its nodes."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    @property
    def address(self) -> str:
        """Address of the cluster's head."""
        if self._cluster is None:
            from ray.cluster_utils import Cluster

            with pytest.MonkeyPatch.context() as patch:
                for name, value in role_environment().items():
                    patch.setenv(name, value)
                self._cluster = Cluster()
                self._cluster.add_node(
                    num_cpus=SHARED_DEVICES + 1,
                    resources=leg_resources(0, SHARED_DEVICES),
                    include_dashboard=False,
                    include_log_monitor=False,  # it reads the logs of all past workers ten times a second
                    node_name=socket.gethostname(),
                    _system_config={"worker_niceness": 0, "task_events_report_interval_ms": 0},
                )
        return self._cluster.address

    def close(self) -> None:
        """Stop the cluster, if it was started."""
        if self._cluster is not None:
            self._cluster.shutdown()


class Workspace:
    """Folder in which a user's commands and runs happen: its own store, work folder and MLflow database."""

    def __init__(self, folder: Path, environment: dict[str, str], shared_ray: SharedRay):
        self.folder = folder
        self.environment = environment
        self.config = folder / "tiny.yaml"
        self.config.write_text(TINY_RUN.format(root=ROOT))
        self.tracking = f"sqlite:///{folder}/{MLFLOW_DATABASE}"
        self._shared_ray = shared_ray
        self._newest: subprocess.Popen[str] | None = None

    # ------------------------------------------------------------------------------------------ runs in this process
    def train(self, *overrides: str, config: Path | str | None = None) -> list[Manifest]:
        """Train a new run to its end in this process, on the shared Ray cluster; return its manifests."""
        run = self.open(*overrides, config=config)
        ended = self.run_leg(run)
        assert ended.ending is LegEnding.FINISHED, ended.cause
        return self.chain(run.run_id)

    def open(self, *overrides: str, config: Path | str | None = None) -> RunRef:
        """Open a new run of a config, by default the tiny one."""
        with contextlib.chdir(self.folder):
            loaded: RunConfig = load_config(config or self.config, overrides)
            check_ready(loaded)
        return open_run(ObjectStore(loaded.store.uri, loaded.store.retry_seconds), with_teachers_pinned(loaded))

    def find(self, run_id: str) -> RunRef:
        return find_run(self.store, run_id)

    def fork(self, run_id: str, iteration: int, *overrides: str) -> list[Manifest]:
        """Fork a run at an iteration and train the fork to its end in this process; return its manifests."""
        with contextlib.chdir(self.folder):
            config = forked_config(self.store, run_id, iteration, overrides)
            check_ready(config)
        fork = open_run(self.store, config)
        ended = self.run_leg(fork)
        assert ended.ending is LegEnding.FINISHED, ended.cause
        return self.chain(fork.run_id)

    def replay(self, run_id: str, iteration: int) -> Replayed:
        """Replay the update of an iteration on the shared Ray cluster."""
        from roll_core.roles.fleet import Fleet
        from tasks.replay import replay

        run, folder = find_run(self.store, run_id), self.folder / f"replay-{run_id}-{iteration}" / "leg"
        folder.mkdir(parents=True)
        with self._in_process(), Fleet(run, read_config(run).without_engines, folder, self._shared_ray.address) as fleet:
            return replay(self.chain(run_id), iteration, self.store, fleet)

    def run_leg(self, run: RunRef, leg: int = 1) -> LegEnded:
        """Run one leg of a run in this process; return how it ended."""
        from flows import train_leg

        def without_restarts(run: RunRef, leg: int, allocation: LegAllocation, stage_cache: Path) -> LegEnded:
            return train_leg.train_leg.with_options(result_storage=stage_cache)(run, leg, allocation)

        with self._in_process(), pytest.MonkeyPatch.context() as patch:
            # Roles are started again only in an allocation that is dear to get; a leg on this machine ends when one dies.
            patch.setattr(train_leg, "train_with_restarts", without_restarts)
            allocation = LegAllocation(ends_at=lambda: float("inf"), ray_address=lambda: self._shared_ray.address)
            return train_leg.run_leg_flow(run, leg, allocation)

    @contextlib.contextmanager
    def _in_process(self) -> Iterator[None]:
        from prefect.settings import (
            PREFECT_API_URL,
            PREFECT_LOGGING_LEVEL,
            PREFECT_LOGGING_TO_API_ENABLED,
            temporary_settings,
        )

        url = self.environment["PREFECT_API_URL"]
        quiet = {PREFECT_LOGGING_LEVEL: "CRITICAL", PREFECT_LOGGING_TO_API_ENABLED: False}
        with (
            contextlib.chdir(self.folder),
            pytest.MonkeyPatch.context() as patch,
            temporary_settings({PREFECT_API_URL: url} | quiet),
        ):
            patch.setenv("PREFECT_API_URL", url)
            yield

    @contextlib.contextmanager
    def when_committed(self, iteration: int, act: Callable[[], object], run_id: str = "tiny-1") -> Iterator[None]:
        """Call `act` in a thread as soon as an iteration is committed; at the end of the block it must have been called."""

        def watch() -> None:
            self.wait_for_iteration(iteration, run_id)
            act()

        with ThreadPoolExecutor(1) as watcher:
            watching = watcher.submit(watch)
            yield
            watching.result()

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL, leg: int = 1, run_id: str = "tiny-1") -> None:
        """Send a signal to a role's process."""
        os.kill(self.pid_of(role, leg, run_id), number)

    # ------------------------------------------------------------------------------------------ commands
    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `roll ARGUMENTS` in a process group of its own, so that signals can be sent as a terminal does."""
        return self._start([ROLL, *arguments], self.environment)

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
            # A shell that starts tests in the background makes them, and their children, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return self._newest

    def roll(self, *arguments: str, deadline_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run `roll ARGUMENTS` to its end; stdout and stderr together."""
        return self._finish(self.start(*arguments), deadline_s)

    def run_module(self, module: str, *arguments: str, deadline_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run `python -m MODULE ARGUMENTS` to its end; stdout and stderr together."""
        return self._finish(self.start_module(module, *arguments), deadline_s)

    def printed(self, *arguments: str) -> str:
        """Run a `roll` command that starts no roles in this process; return what it printed."""
        exit_code, output = self._command_here(*arguments)
        assert exit_code == 0, output
        return output

    def refused(self, *arguments: str) -> str:
        """Run a `roll` command that must refuse its arguments, in this process; return its one line."""
        exit_code, output = self._command_here(*arguments)
        assert exit_code == UserError.exit_code, output
        (line,) = output.splitlines()
        assert line.startswith("roll: ")
        return line

    def roll_here(self, *arguments: str) -> tuple[int, str]:
        """Run `roll ARGUMENTS` in this process, its legs too, on the shared Ray cluster; return exit code and output."""
        from flows import rlvr
        from roll_core.roles.fleet import Fleet

        start = Fleet.__init__

        def on_shared_ray(fleet: Fleet, run: RunRef, config: RunConfig, leg_dir: Path, *_: object) -> None:
            start(fleet, run, config, leg_dir, self._shared_ray.address)

        with self._in_process(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Fleet, "__init__", on_shared_ray)
            patch.setattr(rlvr, "run_leg", lambda run, leg, *_: self.run_leg(run, leg))
            return self._command_here(*arguments)

    def _command_here(self, *arguments: str) -> tuple[int, str]:
        output = io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("COLUMNS", self.environment["COLUMNS"])
            return cli.main(arguments), output.getvalue()

    def _finish(self, process: subprocess.Popen[str], deadline_s: float) -> subprocess.CompletedProcess[str]:
        try:
            output, _ = process.communicate(timeout=patience(deadline_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    # ------------------------------------------------------------------------------------------ what they left
    @property
    def store(self) -> ObjectStore:
        return ObjectStore(f"file://{self.folder}/roll-data/store")

    def seeds_generated(self) -> list[str]:
        """Seeds of all attempts that a `RecordingEngine` generated since the last call."""
        file = self.folder / "generated.txt"
        seeds = file.read_text().split()
        file.unlink()
        return seeds

    def chain(self, run_id: str = "tiny-1") -> list[Manifest]:
        return read_chain(self.store, run_id)

    def checkpoints(self, run_id: str = "tiny-1") -> list[CheckpointRef]:
        return checkpoints_of(self.store, self.chain(run_id))

    def flow_states(self) -> list[str]:
        """States in Prefect of the flow run of `roll run` in this folder and of its legs, in the order they started."""
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
        from prefect.client.schemas.sorting import FlowRunSort
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with (
            temporary_settings({PREFECT_API_URL: self.environment["PREFECT_API_URL"]}),
            get_client(sync_client=True) as client,
        ):
            newest = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=50)
            (outer,) = [run for run in newest if run.parameters.get("config") == str(self.config)]
            its_legs = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[outer.id]))
            legs = client.read_flow_runs(flow_run_filter=its_legs, sort=FlowRunSort.START_TIME_ASC)
            return [run.state.name for run in (outer, *legs)]

    def wait_for_iteration(self, iteration: int, run_id: str = "tiny-1", deadline_s: float = 180.0) -> None:
        manifest = self.folder / f"roll-data/store/runs/{run_id}/iterations/{iteration:08d}.json"
        self.wait_until(manifest.exists, f"iteration {iteration} of {run_id} is committed", deadline_s)

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Poll a condition; fail at once if the command that was started last has failed and its output was not read."""
        newest = self._newest

        def is_true() -> bool:
            if newest is not None and (newest.poll() or 0) > 0 and not newest.stdout.closed and not condition():
                pytest.fail(f"before {what}, a command ended with {newest.returncode}:\n{newest.communicate()[0]}")
            return condition()

        wait_until(is_true, what, deadline_s)

    def pid_of(self, role: str, leg: int = 1, run_id: str = "tiny-1") -> int:
        return json.loads((self.folder / f"roll-data/work/{run_id}/leg-{leg}/processes.json").read_text())[role]


def upload_once(spool_dir: Path) -> int:
    """Upload what a run has spooled for MLflow; return the exit status of the uploader."""
    return subprocess.run([*UPLOADER, str(spool_dir), "--once"], timeout=patience(120)).returncode


@pytest.fixture(scope="session")
def bare_environment() -> dict[str, str]:
    """Environment without settings of any service."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "RAY_"))}
    return environment | {"COLUMNS": "160"}


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory, bare_environment, testrun_uid) -> Path:
    """Prefect database without runs, for copying. All test processes share it: creating one takes 15 CPU seconds."""
    database = tmp_path_factory.getbasetemp().parent / f"prefect-{testrun_uid}.db"
    with FileLock(database.with_suffix(".lock")):
        if not database.exists():
            home = tmp_path_factory.mktemp("prefect-template")
            with embedded_server(home, bare_environment | QUIET | {"PREFECT_HOME": str(home)}):
                copy_database(home / "prefect.db", database)
    return database


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory, prefect_database) -> Path:
    """Folder of the Prefect database of this test process."""
    home = tmp_path_factory.mktemp("prefect-home")
    shutil.copyfile(prefect_database, home / "prefect.db")
    return home


@pytest.fixture(scope="session")
def newcomer(bare_environment, prefect_home) -> dict[str, str]:
    """Environment of a user who has set up nothing: every command starts a Prefect server of its own."""
    return bare_environment | {"PREFECT_HOME": str(prefect_home)}


@pytest.fixture(scope="session")
def prefect_server(newcomer, prefect_home) -> Iterator[str]:
    """Address of one Prefect server for all runs: starting one costs a quarter of a short run."""
    with embedded_server(prefect_home, newcomer | QUIET | SKIP_DATABASE_SETUP) as url:
        yield url


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[SharedRay]:
    cluster = SharedRay()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory) -> Path:
    """An empty MLflow database: creating its tables takes longer than logging a short run."""
    from mlflow import MlflowClient

    database = tmp_path_factory.mktemp("mlflow") / MLFLOW_DATABASE
    MlflowClient(f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture(scope="session")
def new_workspace(tmp_path_factory, newcomer, prefect_server, shared_ray) -> Callable[[str], Workspace]:
    """Factory of workspaces, for runs that several tests look at."""

    def make(name: str) -> Workspace:
        folder = tmp_path_factory.mktemp(name)
        return Workspace(folder, newcomer | QUIET | {"PREFECT_API_URL": prefect_server}, shared_ray)

    return make


@pytest.fixture
def workspace(new_workspace) -> Workspace:
    return new_workspace("workspace")


@pytest.fixture(scope="session")
def tracked(mlflow_database) -> Callable[[Workspace], Workspace]:
    """Give a workspace an MLflow database; its runs upload to it with the setting TRACKED."""

    def track(workspace: Workspace) -> Workspace:
        shutil.copyfile(mlflow_database, workspace.folder / MLFLOW_DATABASE)
        return workspace

    return track
