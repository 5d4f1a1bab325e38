"""What every task of a SLURM job runs: one Ray node; on the first node the leg's driver, too. All of it ends together.
Nodes of other jobs may join it, and go as they came.

The nodes meet by a file in the leg's folder, in which the first one says where Ray's head is; that it is gone means goodbye.
Ports are free ones, and folders the job's own, so that several legs of several people can share nodes; who does not have the
leg's token gets no word from its Ray.

This process never imports Ray: connecting takes over signal handlers, and a lost head ends whoever is connected. Here it
is seen at once, and reported.
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
from infra.slurm.scratch import own_folder
from roll_core.config.operations.placement import ELASTIC_RESOURCE, leg_resources
from roll_core.errors import RollError
from roll_core.host import PRIVATE, free_port, replacing
from roll_core.roles.process import role_environment
from roll_core.types.leg import LegAllocation

OBJECT_STORE_SHARE = 0.3
LOOK_S = 0.3
FOLLOWER_LOOK_S = 2.0
"""There may be a thousand of them, and one head and one disk to look at."""
HEAD_DEADLINE_S = 120.0
MEETING_DEADLINE_S = 300.0
"""How long nodes wait for the first: tasks of a job do not start at the same moment."""
FAREWELL_S = 30.0
"""Within which a driver that has answered, or Ray that was asked to, must have ended."""
STARTS = 3
"""How often Ray is started on a node: a port that was free may be taken, and a Ray that died there can come back."""
HEAD_MISSED = 5
"""Looks in a row at which nobody answers for the head, until it is taken for dead."""


class RayLost(RollError):
    """Ray could not be started on a node, or did not stay there."""


@dataclass(frozen=True)
class NodeShape:
    """What Ray is told a node of the leg has."""

    devices: int
    gpus: int
    object_store_bytes: int | None


@dataclass(frozen=True)
class NodeReport:
    """What the first node says when all is over: the leg's answer, or why there is none."""

    answer: Any | None
    cause: str = ""
    signalled: bool = False
    """Whether the job was told to end."""
    lost_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskIdentity:
    """Which task of which job this process is. A requeued job has the same id: `restart` counts."""

    job_id: str
    restart: int
    rank: int
    node: str
    address: str
    folder: Path

    @property
    def meeting(self) -> Path:
        return self.folder / f"ray-{self.job_id}-{self.restart}.json"

    @property
    def token(self) -> Path:
        return token_of(self.meeting)

    @property
    def over(self) -> Path:
        """There once the first node is done, also if no head ever came up for the others to miss."""
        return self.meeting.with_suffix(".over")


def token_of(meeting: Path) -> Path:
    """Without which nobody gets a word from the Ray whose nodes meet there."""
    return meeting.with_suffix(".token")


@dataclass(frozen=True)
class Head:
    """A head of Ray, as the first node of a leg has told the others."""

    meeting: Path
    address: str

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    @property
    def has_gone(self) -> bool:
        return not self.meeting.exists()


StartRay = Callable[[list[str]], contextlib.AbstractContextManager[subprocess.Popen[bytes]]]
"""One node of Ray, with further options of its command, for as long as the block lasts."""


def run_node(leg: bytes, shape: NodeShape, folder: Path) -> NodeReport | None:
    """Be this node's part of a leg; the first node reports. The leg is pickled, since what it imports takes seconds, and is
    needed in the driver alone."""
    if is_first():
        return _lead_pickled(leg, shape, folder)
    follow(shape, folder)
    return None


def is_first() -> bool:
    return os.environ["SLURM_PROCID"] == "0"


def lead(leg: LegFunction, shape: NodeShape, folder: Path) -> NodeReport:
    """Be the first node of a leg: Ray's head, and the leg."""
    return _lead_pickled(cloudpickle.dumps(leg), shape, folder)


def _lead_pickled(leg: bytes, shape: NodeShape, folder: Path) -> NodeReport:
    with _seated(folder) as (seat, scratch):
        return _lead(leg, shape, seat, scratch)


def join_legs(shape: NodeShape, run_folder: Path) -> NodeReport:
    """Be a node more of whichever leg of a run is there, until none has been for a while, or this job is told to go."""
    leave = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: leave.set())
    with _seated(run_folder) as (seat, scratch):
        try:
            while (head := _find_head(run_folder, seat, leave)) is not None:
                os.environ |= _ray_environment(head.meeting)
                start_ray = functools.partial(_ray, shape, {ELASTIC_RESOURCE: shape.devices}, seat, scratch)
                _stay(seat, head, start_ray, leave)
        except RayLost as error:
            return NodeReport(None, str(error), leave.is_set(), (seat.node,))
    return NodeReport(None, signalled=leave.is_set())


def follow(shape: NodeShape, folder: Path) -> None:
    """Be another node of a leg, until the first one is done."""
    with _seated(folder) as (seat, scratch):
        here = seat.meeting.with_suffix(f".here.{seat.node}")
        here.touch()
        try:
            _follow(shape, seat, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            here.unlink(missing_ok=True)


@contextlib.contextmanager
def _seated(folder: Path) -> Iterator[tuple[TaskIdentity, Path]]:
    node = os.environ["SLURMD_NODENAME"]
    seat = TaskIdentity(
        job_id=os.environ["SLURM_JOB_ID"],
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        rank=int(os.environ["SLURM_PROCID"]),
        node=node,
        address=node_address(node),
        folder=folder,
    )
    os.environ |= _ray_environment(seat.meeting)
    with own_folder(f"{seat.job_id}.{seat.restart}.{seat.rank}") as scratch:
        yield seat, scratch


# -------------------------------------------------------------------------------------------------- the first node
def _lead(leg: bytes, shape: NodeShape, seat: TaskIdentity, scratch: Path) -> NodeReport:
    signals = _Signals()
    for note in set(seat.folder.glob(f"ray-{seat.job_id}-*")) - set(seat.folder.glob(f"{seat.meeting.stem}.*")):
        note.unlink()  # of an earlier start of this job, that was killed
    _write_private(seat.token, secrets.token_hex(32))
    try:
        # The driver imports what it needs while Ray starts.
        with _driver(leg, seat, scratch) as (driver, talk), _head(shape, seat, scratch) as (head, address):
            _write_private(seat.meeting, json.dumps({"head": address}))
            with contextlib.suppress(OSError):  # it may have ended; that is reported below
                talk.send(address)
            signals.forward_to(driver)
            return _watch(head, driver, talk, seat, signals)
    except RayLost as error:
        return NodeReport(None, str(error), signals.came, (seat.node,))
    finally:
        seat.over.touch()
        seat.meeting.unlink(missing_ok=True)
        _wait_for_the_others(seat)
        for note in seat.folder.glob(f"{seat.meeting.stem}.*"):
            note.unlink(missing_ok=True)


def _wait_for_the_others(seat: TaskIdentity) -> None:
    """Until every node has cleared up. The end of this task is the end of theirs."""
    ends_at = time.monotonic() + FAREWELL_S
    while any(seat.folder.glob(f"{seat.meeting.stem}.here.*")) and time.monotonic() < ends_at:
        time.sleep(LOOK_S)


def _watch(
    head: subprocess.Popen[bytes], driver: SpawnProcess, talk: Connection, seat: TaskIdentity, signals: "_Signals"
) -> NodeReport:
    while not wait([talk, driver.sentinel], timeout=LOOK_S):
        if head.poll() is not None:
            raise RayLost(f"the head of Ray on {seat.node} ended with {head.returncode}")
    lost = tuple(path.suffix[1:] for path in sorted(seat.folder.glob(f"{seat.meeting.stem}.lost.*")))
    try:
        return NodeReport(talk.recv(), "", signals.came, lost)
    except EOFError:
        driver.join()
        return NodeReport(None, f"the leg's process ended with {driver.exitcode}", signals.came, lost)


@contextlib.contextmanager
def _head(shape: NodeShape, seat: TaskIdentity, scratch: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    for _ in range(STARTS):
        port = free_port(seat.address)
        options = ["--head", f"--port={port}", f"--ray-client-server-port={free_port(seat.address)}"]
        # Nobody needs an autoscaler, nor what roles print at the driver: each is a process that imports Ray while others do.
        options += ["--no-monitor", "--include-log-monitor=false"]
        # Ray's default niceness of 15 starves roles on a machine that does anything else: seen to slow training thirtyfold.
        options += ["--include-dashboard=false", '--system-config={"worker_niceness": 0}']
        with _ray(shape, leg_resources(seat.rank, shape.devices), seat, scratch, options) as head:
            ends_at = time.monotonic() + HEAD_DEADLINE_S
            while head.poll() is None and time.monotonic() < ends_at:
                if _answers(seat.address, port):
                    yield head, f"{seat.address}:{port}"
                    return
                time.sleep(LOOK_S)
    raise RayLost(f"the head of Ray did not start on {seat.node}; the leg's log has why")


@contextlib.contextmanager
def _driver(leg: bytes, seat: TaskIdentity, scratch: Path) -> Iterator[tuple[SpawnProcess, Connection]]:
    """The leg in a process of its own. It is told where Ray's head is, and answers when it is done."""
    fresh = multiprocessing.get_context("spawn")
    talk, its_end = fresh.Pipe()
    driver = fresh.Process(target=_drive, args=(leg, seat.job_id, scratch, its_end))
    driver.start()
    its_end.close()  # so that the end of the driver is the end of the pipe
    try:
        yield driver, talk
        driver.join(FAREWELL_S)
    finally:
        driver.kill()
        driver.join()


def _drive(leg: bytes, job_id: str, scratch: Path, talk: Connection) -> None:
    run_leg = cloudpickle.loads(leg)
    # The leg starts what else it needs while Ray's head does, and asks again when it starts roles anew.
    place = LegAllocation(ends_at=EndTime(job_id), ray_address=functools.cache(talk.recv), scratch=scratch)
    talk.send(run_leg(place))


class _Signals:
    """SLURM tells a job to end by SIGTERM or SIGUSR2, and only this process hears it. The driver winds up and answers."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._driver: SpawnProcess | None = None
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._hear)

    @property
    def came(self) -> bool:
        return self.heard is not None

    def forward_to(self, driver: SpawnProcess) -> None:
        self._driver = driver
        if self.heard is not None:
            self._hear(self.heard, None)

    def _hear(self, number: int, _: object) -> None:
        self.heard = number
        if self._driver is not None and self._driver.pid is not None and self._driver.is_alive():
            os.kill(self._driver.pid, number)


# -------------------------------------------------------------------------------------------------- the other nodes
def _follow(shape: NodeShape, seat: TaskIdentity, scratch: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the first node says when it is over
    head = wait_for_head(seat)
    if head is None:
        return
    start_ray = functools.partial(_ray, shape, leg_resources(seat.rank, shape.devices), seat, scratch)
    try:
        _stay(seat, head, start_ray, leave=threading.Event())
    except RayLost:
        seat.meeting.with_suffix(f".lost.{seat.node}").touch()
        raise


def _stay(seat: TaskIdentity, head: Head, start_ray: StartRay, leave: threading.Event) -> None:
    """Join the head, again if Ray dies here, for as long as there is one, or until it is time to leave."""
    for _ in range(STARTS):
        with start_ray([f"--address={head.address}", "--include-log-monitor=false"]) as joined:
            missed = 0
            while joined.poll() is None:
                missed = 0 if _answers(*head.host_and_port) else missed + 1
                if missed > HEAD_MISSED or head.has_gone or leave.wait(FOLLOWER_LOOK_S):
                    return
        if head.has_gone or leave.is_set():
            return
    raise RayLost(f"Ray did not stay on {seat.node}")


def _find_head(run_folder: Path, seat: TaskIdentity, leave: threading.Event) -> Head | None:
    """The head of a leg of the run, once one answers; None if none does for a while, or it is time to leave.

    Not the head of this very node: its driver would take us for the node to connect by.
    """
    ends_at = time.monotonic() + MEETING_DEADLINE_S
    while time.monotonic() < ends_at and not leave.is_set():
        for meeting in run_folder.glob("leg-*/ray-*.json"):
            with contextlib.suppress(OSError):  # it has just gone
                head = _read_head(meeting)
                if head.host_and_port[0] != seat.address and _answers(*head.host_and_port):
                    return head
        leave.wait(FOLLOWER_LOOK_S)
    return None


def wait_for_head(seat: TaskIdentity) -> Head | None:
    """The head of the leg, once it is up; None if the first node has given up before."""
    ends_at = time.monotonic() + MEETING_DEADLINE_S
    while time.monotonic() < ends_at:
        if seat.over.exists():
            return None
        with contextlib.suppress(OSError):
            return _read_head(seat.meeting)
        time.sleep(FOLLOWER_LOOK_S)
    raise RayLost(f"{seat.node} waited {MEETING_DEADLINE_S:.0f} s for the first node of the leg")


def _read_head(meeting: Path) -> Head:
    return Head(meeting, json.loads(meeting.read_text())["head"])


# -------------------------------------------------------------------------------------------------- every node
@contextlib.contextmanager
def _ray(
    shape: NodeShape, resources: dict[str, int], seat: TaskIdentity, scratch: Path, options: list[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """One node of Ray, for as long as the block lasts."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--log-style=record",
        "--disable-usage-stats",
    ]
    command += [f"--node-ip-address={seat.address}", f"--node-name={seat.node}", f"--temp-dir={scratch / 'ray'}"]
    command += [f"--num-cpus={shape.devices + 1}", f"--num-gpus={shape.gpus}"]
    command += [f"--resources={json.dumps(resources)}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port(seat.address)}"]
    if (num_bytes := shape.object_store_bytes or _share_of_memory()) is not None:
        command.append(f"--object-store-memory={num_bytes}")
    environment = os.environ | role_environment()
    ray = subprocess.Popen(command + options, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
    try:
        yield ray
    finally:
        ray.terminate()
        try:
            ray.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            os.killpg(ray.pid, signal.SIGKILL)


def _ray_environment(meeting: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_of(meeting)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # or Ray waits half a minute for work to leave a node
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    }


def _share_of_memory() -> int | None:
    """Of what SLURM gave the job here; null, where that is all the node has, leaves it to Ray."""
    megabytes = int(os.environ.get("SLURM_MEM_PER_NODE", "0"))
    return int(OBJECT_STORE_SHARE * megabytes * 2**20) or None


def _write_private(path: Path, text: str) -> None:
    """Write a file for its owner alone; readers see all of it or none."""
    with replacing(path, PRIVATE) as file:
        file.write(text.encode())


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False
