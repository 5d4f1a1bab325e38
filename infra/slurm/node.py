"""Entry points of the tasks of a SLURM job, one task per node. `infra/slurm/slurm.py` and `tasks/legs.py` use them.

Every task runs one Ray node. The first task runs the Ray head and the leg's driver; when it ends, the other tasks end.
Tasks of elastic jobs (`join_legs`) join the Ray cluster of a running leg and may leave at any time.

The rendezvous is a file in the leg's folder: the first task writes the address of the Ray head into it, and deletes it to
end the leg. Ports are free ones, scratch folders belong to one job, and Ray requires a token, so legs of several users can
share a node. This process never imports Ray: a connection to Ray replaces signal handlers, and the loss of the head would
kill it.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import cloudpickle

from infra.slurm.launcher import LegFunction
from infra.slurm.queue import EndTime, node_address
from infra.slurm.scratch import locked_folder
from roll_core.config.operations.placement import ELASTIC_RESOURCE, leg_resources
from roll_core.errors import RollError
from roll_core.host import PRIVATE, atomic_replace, free_port
from roll_core.roles.process import role_environment
from roll_core.types.leg import LegAllocation

OBJECT_STORE_FRACTION = 0.3
"""Fraction of the job's memory on a node that Ray's object store gets, unless the config sets its size."""
POLL_S = 0.3
"""Seconds between two checks of the first task: of its driver, of the Ray head, and of the workers' presence files."""
WORKER_POLL_S = 2.0
"""Seconds between two checks of a worker. A thousand workers may poll the same head and the same disk."""
HEAD_DEADLINE_S = 120.0
"""Seconds that one start of the Ray head may take until it accepts connections."""
RENDEZVOUS_DEADLINE_S = 300.0
"""Seconds that a node waits for the rendezvous file. Tasks of a job do not start at the same moment."""
SHUTDOWN_S = 30.0
"""Seconds that the driver (after it returned its result), Ray (after SIGTERM) or the workers have to end."""
MAX_RAY_STARTS = 3
"""Number of times Ray is started on a node. A free port may be taken before Ray binds it, and a Ray node may die."""
MAX_MISSED_PINGS = 5
"""Number of consecutive failed connections to the Ray head that a worker tolerates. One more means the head is dead."""


class RayLost(RollError):
    """Ray did not start on a node, or kept dying there."""


@dataclass(frozen=True)
class NodeShape:
    """Resources of a node of the leg: what `ray start` declares for it, and for how long it is requested."""

    devices: int
    gpus: int
    object_store_bytes: int | None
    """Size of Ray's object store in bytes; None takes OBJECT_STORE_FRACTION of the job's memory on the node."""
    time_limit_s: float
    """Seconds that the leg requested; they count from its start where SLURM does not tell the node when the job ends."""


@dataclass(frozen=True)
class NodeReport:
    """Report of the job's first task: the result of the leg, or the reason why there is none."""

    result: Any | None
    """Return value of the leg function; None if the leg did not return."""
    cause: str = ""
    """Reason why `result` is missing; empty otherwise."""
    signalled: bool = False
    """True if the job received SIGTERM or SIGUSR2."""
    lost_nodes: tuple[str, ...] = ()
    """Names of nodes on which Ray failed."""
    restart: int = 0
    """Number of times SLURM had requeued the job when this report was made."""


@dataclass(frozen=True)
class TaskIdentity:
    """Identity of this process within its SLURM job, and the paths of the files through which the job's tasks coordinate.

    Example: TaskIdentity(job_id="1207", restart=0, rank=1, node="gpu-17", address="10.0.0.17", folder=Path("/shared/leg-2"))
    """

    job_id: str
    restart: int
    """Number of times SLURM requeued the job. A requeued job keeps its id."""
    rank: int
    """Rank of the task in the job (SLURM_PROCID); 0 is the first task."""
    node: str
    address: str
    """IP address by which other nodes reach this one."""
    folder: Path
    """Folder on a shared disk for the files below."""

    @property
    def rendezvous_file(self) -> Path:
        """Path of the file that holds the address of the Ray head. It exists while the head is up."""
        return self.folder / f"ray-{self.job_id}-{self.restart}.json"

    @property
    def token_file(self) -> Path:
        """Path of the Ray authentication token of this job."""
        return token_file(self.rendezvous_file)

    @property
    def done_file(self) -> Path:
        """Path of the file that exists once the first task has ended, even if its Ray head never came up."""
        return self.rendezvous_file.with_suffix(".over")


def token_file(rendezvous_file: Path) -> Path:
    """Path of the Ray authentication token next to a rendezvous file."""
    return rendezvous_file.with_suffix(".token")


@dataclass(frozen=True)
class Head:
    """Ray head of a leg, as read from the leg's rendezvous file.

    Example: Head(Path("/shared/leg-2/ray-1207-0.json"), address="10.0.0.16:6379")
    """

    rendezvous_file: Path
    address: str

    @property
    def host_and_port(self) -> tuple[str, int]:
        """IP address and TCP port of the head."""
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    @property
    def has_gone(self) -> bool:
        """True if the rendezvous file was deleted, which ends the leg."""
        return not self.rendezvous_file.exists()


StartRay = Callable[[list[str]], contextlib.AbstractContextManager[subprocess.Popen[bytes]]]
"""Function that starts one Ray node with additional `ray start` options, as a context manager that stops it on exit."""


def run_node(leg: bytes, shape: NodeShape, folder: Path) -> NodeReport | None:
    """Run this task's part of a leg: the head in the first task, which returns the report, a worker in the others.

    `leg` is a pickled LegFunction: unpickling imports modules for seconds, and only the driver's process needs them.
    """
    if is_first_task():
        return _run_pickled_head(leg, shape, folder)
    run_worker(shape, folder)
    return None


def is_first_task() -> bool:
    """True if this process is the first task of its SLURM job."""
    return os.environ["SLURM_PROCID"] == "0"


def run_head(leg: LegFunction, shape: NodeShape, folder: Path) -> NodeReport:
    """Run the first node of a leg, which holds the Ray head and the leg's driver, until the leg ends."""
    return _run_pickled_head(cloudpickle.dumps(leg), shape, folder)


def _run_pickled_head(leg: bytes, shape: NodeShape, folder: Path) -> NodeReport:
    signals = _SignalForwarder()  # first: a signal that comes from here on interrupts the leg, and is not its failure
    with _as_task(folder) as (task, scratch):
        return _run_head(leg, shape, task, scratch, signals)


def join_legs(shape: NodeShape, run_folder: Path) -> NodeReport:
    """Lend this node to the running leg of a run, and to the legs that follow it.

    Return once no leg was found for RENDEZVOUS_DEADLINE_S, once this job receives SIGTERM or SIGUSR2, or if Ray fails here.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: stop.set())
    with _as_task(run_folder) as (task, scratch):
        try:
            while (head := _find_head(run_folder, task, stop)) is not None:
                os.environ |= _ray_environment(head.rendezvous_file)
                start_ray = functools.partial(_ray_node, shape, {ELASTIC_RESOURCE: shape.devices}, task, scratch)
                _keep_ray_alive(task, head, start_ray, stop)
        except RayLost as error:
            return NodeReport(None, str(error), stop.is_set(), (task.node,), task.restart)
    return NodeReport(None, signalled=stop.is_set(), restart=task.restart)


def run_worker(shape: NodeShape, folder: Path) -> None:
    """Run a further node of a leg until the first node ends."""
    with _as_task(folder) as (task, scratch):
        presence_file = task.rendezvous_file.with_suffix(f".here.{task.node}")
        presence_file.touch()
        try:
            _run_worker(shape, task, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            presence_file.unlink(missing_ok=True)


@contextlib.contextmanager
def _as_task(folder: Path) -> Iterator[tuple[TaskIdentity, Path]]:
    """Provide the identity of this task and its scratch folder. Also set Ray's environment variables in this process."""
    node = os.environ["SLURMD_NODENAME"]
    task = TaskIdentity(
        job_id=os.environ["SLURM_JOB_ID"],
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        rank=int(os.environ["SLURM_PROCID"]),
        node=node,
        address=node_address(node),
        folder=folder,
    )
    os.environ |= _ray_environment(task.rendezvous_file)
    with locked_folder(f"{task.job_id}.{task.restart}.{task.rank}") as scratch:
        yield task, scratch


# -------------------------------------------------------------------------------------------------- the first node
def _run_head(leg: bytes, shape: NodeShape, task: TaskIdentity, scratch: Path, signals: "_SignalForwarder") -> NodeReport:
    ends_at = EndTime(task.job_id, time.time() + shape.time_limit_s)
    for path in set(task.folder.glob(f"ray-{task.job_id}-*")) - set(task.folder.glob(f"{task.rendezvous_file.stem}.*")):
        path.unlink()  # left by an earlier start of this job that was killed
    _write_private(task.token_file, secrets.token_hex(32))
    try:
        # The driver imports its modules while Ray starts.
        with _driver_process(leg, ends_at, scratch) as (driver, pipe), _ray_head(shape, task, scratch) as (head, address):
            _write_private(task.rendezvous_file, json.dumps({"head": address}))
            with contextlib.suppress(OSError):  # the driver may have ended already; `_supervise` reports that
                pipe.send(address)
            signals.forward_to(driver)
            return _supervise(head, driver, pipe, task, signals)
    except RayLost as error:
        return NodeReport(None, str(error), signals.received, (task.node,), task.restart)
    finally:
        task.done_file.touch()
        task.rendezvous_file.unlink(missing_ok=True)
        _wait_for_workers(task)
        for path in task.folder.glob(f"{task.rendezvous_file.stem}.*"):
            path.unlink(missing_ok=True)


def _wait_for_workers(task: TaskIdentity) -> None:
    """Wait until every worker has removed its scratch folder, at most SHUTDOWN_S. SLURM kills them when this task ends."""
    ends_at = time.monotonic() + SHUTDOWN_S
    while any(task.folder.glob(f"{task.rendezvous_file.stem}.here.*")) and time.monotonic() < ends_at:
        time.sleep(POLL_S)


def _supervise(
    head: subprocess.Popen[bytes], driver: SpawnProcess, pipe: Connection, task: TaskIdentity, signals: "_SignalForwarder"
) -> NodeReport:
    """Wait until the driver returns its result or ends, and report it. Raise RayLost if the Ray head ends before that."""
    while not wait([pipe, driver.sentinel], timeout=POLL_S):
        if head.poll() is not None:
            raise RayLost(f"the head of Ray on {task.node} ended with {head.returncode}")
    lost_nodes = tuple(path.suffix[1:] for path in sorted(task.folder.glob(f"{task.rendezvous_file.stem}.lost.*")))
    try:
        return NodeReport(pipe.recv(), "", signals.received, lost_nodes, task.restart)
    except (EOFError, OSError):  # ConnectionResetError, if the driver had not yet read the head's address when it died
        driver.join()
        cause = f"the leg's process ended with {driver.exitcode}"
        return NodeReport(None, cause, signals.received, lost_nodes, task.restart)


@contextlib.contextmanager
def _ray_head(shape: NodeShape, task: TaskIdentity, scratch: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a Ray head during the block: yield its process and its address, host:port, once it accepts connections."""
    for _ in range(MAX_RAY_STARTS):
        port = free_port(task.address)
        options = ["--head", f"--port={port}", f"--ray-client-server-port={free_port(task.address)}"]
        # No autoscaler and no log monitor: nothing uses them, and each is one more process that imports Ray at the start.
        options += ["--no-monitor", "--include-log-monitor=false"]
        # Ray's default niceness of 15 starves roles on a machine that does anything else: it slowed training thirtyfold.
        options += ["--include-dashboard=false", '--system-config={"worker_niceness": 0}']
        with _ray_node(shape, leg_resources(task.rank, shape.devices), task, scratch, options) as head:
            ends_at = time.monotonic() + HEAD_DEADLINE_S
            while head.poll() is None and time.monotonic() < ends_at:
                if _accepts_connections(task.address, port):
                    yield head, f"{task.address}:{port}"
                    return
                time.sleep(POLL_S)
    raise RayLost(f"the head of Ray did not start on {task.node}; the leg's log has why")


@contextlib.contextmanager
def _driver_process(leg: bytes, ends_at: EndTime, scratch: Path) -> Iterator[tuple[SpawnProcess, Connection]]:
    """Run the leg in a process of its own during the block. The pipe carries the Ray head's address to it, and its result
    back."""
    spawn_context = multiprocessing.get_context("spawn")
    pipe, driver_end = spawn_context.Pipe()
    driver = spawn_context.Process(target=_run_driver, args=(leg, ends_at, scratch, driver_end))
    driver.start()
    driver_end.close()  # now the pipe reaches its end of file when the driver ends
    try:
        yield driver, pipe
        driver.join(SHUTDOWN_S)
    finally:
        driver.kill()
        driver.join()


def _run_driver(leg: bytes, ends_at: EndTime, scratch: Path, pipe: Connection) -> None:
    """Run a pickled leg in the driver's process and send its result through the pipe."""
    run_leg = cloudpickle.loads(leg)
    # The address is received on first use, since the leg starts other services while the Ray head starts. It is cached,
    # since the leg asks again when it restarts its roles.
    allocation = LegAllocation(ends_at=ends_at, ray_address=functools.cache(pipe.recv), scratch=scratch)
    pipe.send(run_leg(allocation))


class _SignalForwarder:
    """Signal handler that forwards SIGTERM and SIGUSR2 to the driver, which then commits, stores a checkpoint and returns.

    SLURM asks a job to end by these signals, and sends them to this process only.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._driver_process: SpawnProcess | None = None
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    @property
    def received(self) -> bool:
        """True if a signal was received."""
        return self.signal_number is not None

    def forward_to(self, driver: SpawnProcess) -> None:
        """Forward later signals to the driver, and the last signal that was received before."""
        self._driver_process = driver
        if self.signal_number is not None:
            self._on_signal(self.signal_number, None)

    def _on_signal(self, number: int, _: object) -> None:
        self.signal_number = number
        if self._driver_process is not None and self._driver_process.pid is not None and self._driver_process.is_alive():
            os.kill(self._driver_process.pid, number)


# -------------------------------------------------------------------------------------------------- the other nodes
def _run_worker(shape: NodeShape, task: TaskIdentity, scratch: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the first node decides when the leg ends
    head = wait_for_head(task)
    if head is None:
        return
    start_ray = functools.partial(_ray_node, shape, leg_resources(task.rank, shape.devices), task, scratch)
    try:
        _keep_ray_alive(task, head, start_ray, stop=threading.Event())
    except RayLost:
        task.rendezvous_file.with_suffix(f".lost.{task.node}").touch()
        raise


def _keep_ray_alive(task: TaskIdentity, head: Head, start_ray: StartRay, stop: threading.Event) -> None:
    """Keep a Ray node joined to the head until the head is gone or `stop` is set.

    Restart Ray if it dies on this node. Raise RayLost when it has died MAX_RAY_STARTS times.
    """
    for _ in range(MAX_RAY_STARTS):
        with start_ray([f"--address={head.address}", "--include-log-monitor=false"]) as ray_node:
            num_missed = 0
            while ray_node.poll() is None:
                num_missed = 0 if _accepts_connections(*head.host_and_port) else num_missed + 1
                if num_missed > MAX_MISSED_PINGS or head.has_gone or stop.wait(WORKER_POLL_S):
                    return
        if head.has_gone or stop.is_set():
            return
    raise RayLost(f"Ray did not stay on {task.node}")


def _find_head(run_folder: Path, task: TaskIdentity, stop: threading.Event) -> Head | None:
    """Wait for a reachable Ray head of any leg of the run; None after RENDEZVOUS_DEADLINE_S, or if `stop` is set.

    Skip a head on this node: its driver would connect through our Ray node instead of its own.
    """
    ends_at = time.monotonic() + RENDEZVOUS_DEADLINE_S
    while time.monotonic() < ends_at and not stop.is_set():
        for rendezvous_file in run_folder.glob("leg-*/ray-*.json"):
            with contextlib.suppress(OSError):  # the file was just deleted
                head = _read_head(rendezvous_file)
                if head.host_and_port[0] != task.address and _accepts_connections(*head.host_and_port):
                    return head
        stop.wait(WORKER_POLL_S)
    return None


def wait_for_head(task: TaskIdentity) -> Head | None:
    """Wait for the Ray head of this job; None if the first task ended without one. Raise RayLost at the deadline."""
    ends_at = time.monotonic() + RENDEZVOUS_DEADLINE_S
    while time.monotonic() < ends_at:
        if task.done_file.exists():
            return None
        with contextlib.suppress(OSError):
            return _read_head(task.rendezvous_file)
        time.sleep(WORKER_POLL_S)
    raise RayLost(f"{task.node} waited {RENDEZVOUS_DEADLINE_S:.0f} s for the first node of the leg")


def _read_head(rendezvous_file: Path) -> Head:
    return Head(rendezvous_file, json.loads(rendezvous_file.read_text())["head"])


# -------------------------------------------------------------------------------------------------- every node
@contextlib.contextmanager
def _ray_node(
    shape: NodeShape, resources: dict[str, int], task: TaskIdentity, scratch: Path, options: list[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one Ray node during the block, as a `ray start --block` process with additional options."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--log-style=record",
        "--disable-usage-stats",
    ]
    command += [f"--node-ip-address={task.address}", f"--node-name={task.node}", f"--temp-dir={scratch / 'ray'}"]
    command += [f"--num-cpus={shape.devices + 1}", f"--num-gpus={shape.gpus}"]
    command += [f"--resources={json.dumps(resources)}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port(task.address)}"]
    if (num_bytes := shape.object_store_bytes or _object_store_bytes()) is not None:
        command.append(f"--object-store-memory={num_bytes}")
    environment = os.environ | role_environment()
    process = subprocess.Popen(command + options, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _ray_environment(rendezvous_file: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file(rendezvous_file)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # otherwise Ray waits half a minute for a node to drain
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        "RAY_task_events_report_interval_ms": "0",  # no record of every call, which the head would keep in memory
    }


def _object_store_bytes() -> int | None:
    """Size of Ray's object store in bytes, from the memory SLURM gave the job on this node.

    None if the job has all of the node's memory: Ray then chooses the size.
    """
    megabytes = int(os.environ.get("SLURM_MEM_PER_NODE", "0"))
    return int(OBJECT_STORE_FRACTION * megabytes * 2**20) or None


def _write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner alone."""
    with atomic_replace(path, PRIVATE) as file:
        file.write(text.encode())


def _accepts_connections(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False
