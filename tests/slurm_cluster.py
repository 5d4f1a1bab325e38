"""Real SLURM cluster on this machine: munge, a controller and several node daemons, with all files in one folder.

Needs root and Debian's packages (`make setup-test` installs them). Nodes are virtual: daemons with their own port and
loopback address that share the machine's processors. Jobs run in cgroups, so that no process of a job outlives it. There
are two partitions: jobs of `high` preempt jobs of `low`, which are requeued.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import free_ports, patience

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
NODE = "TEST_SLURM_NODE"
"""Environment variable of a node's daemon and of the daemons that it starts to supervise jobs. Jobs do not have it."""
CPUS, MEMORY_MB = 8, 6000
"""Resources that each node advertises; nothing enforces them."""


class SlurmCluster:
    """SLURM cluster as a context manager. SLURM commands find the cluster through `environment`."""

    def __init__(self, folder: Path, num_nodes: int = 3, name: str = ""):
        """Create a cluster. `name` keeps it apart from other clusters of this process."""
        self.folder = folder
        # Cgroups are named after nodes. The pid keeps names of two clusters on one machine apart.
        self.nodes = [f"t{os.getpid()}{name}n{number}" for number in range(1, num_nodes + 1)]
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":
        _require_programs()
        self._write_files()
        try:
            self._start(
                "munged", ["munged", "--foreground", "--force", *self._munge_options()]
            )  # --force: only root can access the folder
            self._wait_until(self._munge_socket.exists, "munged listens")
            self.start_controller()
            for node in self.nodes:
                self.start_node(node)
            self._wait_until(lambda: self.idle_nodes() == self.nodes, "all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.SubprocessError):
                self.command("scancel", "--state=PENDING", "--user=root")
                self.command("scancel", "--user=root")
                self._wait_until(lambda: not self.jobs(), "all jobs are gone")
        for name in [*self.nodes, "slurmctld", "munged"]:
            self._stop(name)
        for node in self.nodes:
            for group in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
                with contextlib.suppress(OSError):  # a cgroup that is not empty stays
                    group.rmdir()

    # ---------------------------------------------------------------------------------------- SLURM commands
    def command(self, *words: str) -> str:
        """Run a SLURM command and return its output. The timeout is short, since all commands wait for a dead controller."""
        environment = os.environ | self.environment
        return subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience(30),
            check=True,
            stdin=subprocess.DEVNULL,
        ).stdout

    def jobs(self) -> list[str]:
        """Ids of all jobs that are pending, running or completing."""
        return self.command("squeue", "--noheader", "--format=%i").split()

    def fields(self, job_id: str) -> dict[str, str]:
        """Fields of `scontrol show job`, also of a job that has ended."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "show", "job", "--oneliner", job_id)))

    def idle_nodes(self) -> list[str]:
        """Names of all idle nodes; none while the controller is down."""
        try:
            return sorted(self.command("sinfo", "--noheader", "-N", "-p", "low", "-t", "idle", "-o", "%N").split())
        except subprocess.SubprocessError:  # the controller is not up yet
            return []

    # ---------------------------------------------------------------------------------------- controller and nodes
    def start_controller(self) -> None:
        """Start the controller. After a death it knows its jobs from its state folder."""
        self._start("slurmctld", ["slurmctld", "-D", "-i"])

    def lose_controller(self) -> None:
        """Kill the controller, if it is not dead yet."""
        controller = self._daemons.pop("slurmctld")
        controller.kill()
        controller.wait()

    @property
    def controller_pid(self) -> int:
        return self._daemons["slurmctld"].pid

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start(node, ["slurmd", "-D", "-N", node], {NODE: node})

    def lose_node(self, node: str) -> None:
        """Kill a node like a power cut: its daemon, the supervisors of its jobs, and all processes of its jobs."""
        del self._daemons[node]
        daemons = _with_environment(f"{NODE}={node}")
        for pid in daemons:
            os.kill(pid, signal.SIGSTOP)  # else a daemon that is still alive would report killed jobs to the controller
        for group in sorted(Path("/sys/fs/cgroup/freezer").glob(f"slurm_{node}/**/cgroup.procs"), reverse=True):
            for pid in group.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for pid in daemons:
            os.kill(pid, signal.SIGKILL)

    # ---------------------------------------------------------------------------------------- daemons and files
    def _start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        program = find_program(command[0])
        with open(self.folder / f"{name}.out", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                [program, *command[1:]],
                env=os.environ | self.environment | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _stop(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        daemon.terminate()
        try:
            daemon.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = patience(START_DEADLINE_S)
        ends_at = time.monotonic() + deadline_s
        while not condition():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > ends_at:
                why = f"{', '.join(ended)} ended" if ended else f"{deadline_s:.0f} s went by"
                raise RuntimeError(f"SLURM: {why} before {what}; the daemons say:\n{self._logs()}")
            time.sleep(0.1)

    def _logs(self) -> str:
        """Last five lines of every daemon's output, for an error message that outlives the folder."""
        tails = {path.name: path.read_text(errors="replace").splitlines()[-5:] for path in self.folder.glob("*.out")}
        return "\n".join(f"{name}: {line}" for name, lines in sorted(tails.items()) for line in lines)

    @property
    def _munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    def _munge_options(self) -> list[str]:
        munge = self._munge_socket.parent
        return [
            *(f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid"),
            *(f"--seed-file={munge}/seed", f"--log-file={munge}/log"),
        ]

    def _write_files(self) -> None:
        for name in ("munge", "state", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, mode=0o755)
        key = self._munge_socket.parent / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().partition(".")[0]
        controller_port, *node_ports = free_ports(1 + len(self.nodes))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.{10 + number} Port={port} CPUs={CPUS} Boards=1 "
            f"SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB} State=UNKNOWN"
            for number, (node, port) in enumerate(zip(self.nodes, node_ports, strict=True), start=1)
        )
        (self.folder / "slurm.conf").write_text(
            _CONFIG.format(
                folder=self.folder, host=host, controller_port=controller_port, nodes=nodes, names=",".join(self.nodes)
            )
        )
        (self.folder / "cgroup.conf").write_text(_CGROUPS)


_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
BatchStartTimeout=10
MessageTimeout=10
TCPTimeout=2
UnkillableStepTimeout=30
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=10000,bf_interval=1,batch_sched_delay=0,sched_interval=2
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=low Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

_CGROUPS = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
"""


def _require_programs() -> None:
    missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} not found" if missing else "this is not root"
        raise RuntimeError(
            f"the tests on SLURM start one of their own and cannot here: {why}. As root: make setup-test, or "
            "apt-get install slurm-wlm munge"
        )


_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def find_program(program: str) -> str:
    """Path of a program of SLURM."""
    found = shutil.which(program, path=_PATH)
    assert found is not None
    return found


def _with_environment(setting: str) -> list[int]:
    """Pids of all processes that were started with this NAME=VALUE in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting.encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found
