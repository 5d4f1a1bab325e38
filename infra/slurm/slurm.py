"""SLURM launcher: a leg as a SLURM job with one task per node. Each task runs `node.run_node`. Used by `tasks/`.

The job outlives the process that submitted it. This file also writes the sbatch script of a run without a flow.
"""

import contextlib
import io
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import submitit
from submitit.core.utils import FailedJobError, JobPaths, pickle_load
from submitit.slurm.slurm import _make_sbatch_string

from infra.slurm import queue
from infra.slurm.launcher import JobEnd, LegFunction, LegRequest
from infra.slurm.local import last_line
from infra.slurm.node import NodeReport, NodeShape, join_legs, run_node
from roll_core.config.operations.legs import SlurmLauncherConfig
from roll_core.types.leg import LegEnding

NARROWING_OPTIONS = {"clusters", "constraint", "nodefile", "nodelist", "reservation"}
"""sbatch options after which not every node of the partition will do."""


class SlurmLauncher:
    """Launcher that submits legs as SLURM jobs."""

    def __init__(self, config: SlurmLauncherConfig):
        self._config = config

    def submit(self, request: LegRequest, leg: LegFunction) -> "SlurmLegJob":
        request = replace(request, exclude=self._excluded(request))
        return self._submit(request, run_node, cloudpickle.dumps(leg), node_shape(self._config, request), request.folder)

    def _excluded(self, request: LegRequest) -> tuple[str, ...]:
        """Nodes that a leg excludes: those it must not have, and those to avoid if the partition has enough others."""
        if not request.avoid or not NARROWING_OPTIONS.isdisjoint(self._config.options):
            return request.exclude
        excluded = (*request.exclude, *request.avoid)
        try:
            has_enough = queue.num_other_nodes(self._config.partition, excluded) >= request.nodes
        except queue.SlurmUnavailable:
            has_enough = False
        return excluded if has_enough else request.exclude

    def submit_elastic(self, request: LegRequest, run_folder: Path) -> "SlurmLegJob":
        """Submit an elastic job: one additional node that joins whichever leg of the run is running."""
        return self._submit(request, join_legs, node_shape(self._config, request), run_folder)

    def _submit(self, request: LegRequest, function: Callable[..., NodeReport | None], *arguments: Any) -> "SlurmLegJob":
        executor = submitit.SlurmExecutor(folder=request.folder, max_num_timeout=0, python=self._config.python)
        executor.update_parameters(**sbatch_parameters(self._config, request))
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints the error that it raises
                job = executor.submit(function, *arguments)
        except FailedJobError as error:
            raise submission_error(str(error), request) from None
        return self.attach(job.job_id, request.folder)

    def check(self, request: LegRequest) -> None:
        """Raise SlurmRefused if SLURM would refuse a leg's job for what it requests. Submits nothing.

        Passes while the controller is away, and what only a submission can tell: before it, nodes that are too small and
        nodes that are drained get the same answer.
        """
        script = sbatch_script(self._config, request, [])
        try:
            queue.run_command("sbatch", "--test-only", script=script)
        except queue.SlurmUnavailable as error:
            refused = submission_error(str(error), request)
            if isinstance(refused, queue.SlurmRefused) and NO_SUCH_NODES not in str(error):
                raise refused from None

    def find(self, prefix: str) -> dict[str, str]:
        return queue.find_jobs(prefix)

    def attach(self, job_id: str, folder: Path) -> "SlurmLegJob":
        return SlurmLegJob(job_id, folder)


class SlurmLegJob:
    """Leg that runs as a SLURM job."""

    poll_s = 2.0
    """All users of the cluster share one controller, so polls are rare."""

    def __init__(self, job_id: str, folder: Path):
        self.job_id = job_id
        self._paths = JobPaths(folder, job_id=job_id, task_id=0)
        self.log = Path(self._paths.stdout)
        self._state = queue.JobState("UNKNOWN")

    def describe(self) -> str:
        return queue.job_state(self.job_id).describe(time.time())

    def has_ended(self) -> bool:
        """True if SLURM says that the job is over; False while the controller is down.

        A result on disk does not count: SLURM may requeue a job after it wrote its result, and then the job runs again.
        """
        try:
            self._state = queue.job_state(self.job_id)
        except queue.SlurmUnavailable:
            return False
        return self._state.is_over or self._state == queue.FORGOTTEN

    @property
    def obstacle(self) -> str:
        """Sentence about a job that is held, at the last call of `has_ended`, and how to release it; "" otherwise."""
        if not self._state.is_held:
            return ""
        return f"job {self.job_id} is held by {self._state.held_by}: release it with: scontrol release {self.job_id}"

    @property
    def nodes(self) -> str:
        """Node list at the last call of `has_ended`, in SLURM's notation; "" if the job was not running."""
        return self._state.nodes if self._state.name == "RUNNING" else ""

    def end(self) -> JobEnd:
        return read_end(self._state, self._outcome())

    def cancel(self) -> None:
        queue.cancel_job(self.job_id)

    def _outcome(self) -> NodeReport | str | None:
        """Report of the first node, or the traceback if it raised; None if it wrote nothing.

        A report of a start before SLURM requeued the job is none: the job ran again after it.
        """
        if not self._paths.result_pickle.exists():
            return None
        outcome = pickle_load(self._paths.result_pickle)[1]
        is_stale = isinstance(outcome, NodeReport) and self._state.restarts not in (None, outcome.restart)
        return None if is_stale else outcome


def read_end(state: queue.JobState, outcome: NodeReport | str | None) -> JobEnd:
    """Combine SLURM's final state of a job with its outcome: the first node's report, a traceback, or None."""
    slurm_says = f"SLURM says {state.name}" + (f" ({state.reason})" if state.reason not in ("", "None") else "")
    if isinstance(outcome, NodeReport):
        cause = "; ".join(filter(None, [outcome.cause, slurm_says]))
        lost_nodes = outcome.lost_nodes or state.lost_nodes
        return JobEnd(_reported_ending(state, outcome), outcome.result, cause, lost_nodes, state.nodes)
    says = "left no answer" if outcome is None else f"failed ({last_line(outcome)})"
    ending = queue.ENDED.get(state.name)
    if ending is None and (state.was_interrupted or NOT_REQUEUED in (outcome or "")):
        ending = LegEnding.PREEMPTED  # by a signal that came before the first task handled signals
    return JobEnd(ending, None, f"the leg's job {says}; {slurm_says}", state.lost_nodes, state.nodes)


def _reported_ending(state: queue.JobState, report: NodeReport) -> LegEnding | None:
    """Ending of a job whose first node left a report; None if only the leg's result knows it."""
    ending = queue.ENDED.get(state.name)
    if ending is None and (report.lost_nodes or state.lost_nodes):
        return LegEnding.NODE_FAIL
    if ending is None and report.signalled and report.result is None:
        return LegEnding.PREEMPTED
    return ending


NOT_REQUEUED = "Job not requeued because"
"""Words of submitit's error when a signal reaches a job in the moment before the job handles signals itself."""
NO_SUCH_NODES = "node configuration is not available"
"""Words with which sbatch refuses a job for which no node is large enough, or none is left."""
REFUSALS = {
    "invalid partition": "legs.launcher.partition",
    "not permitted to use this partition": "legs.launcher.partition",
    "access/permission denied": "legs.launcher.partition or legs.launcher.account",
    "invalid account": "legs.launcher.account",
    "invalid qos": "legs.launcher.qos",
    "memory specification": "legs.launcher.memory_gigabytes",
    "time limit": "legs.time_limit_minutes",
    "node count specification": "cluster.nodes",
    "more processors requested": "legs.launcher.cpus_per_node",
    "cpu count": "legs.launcher.cpus_per_node",
    "generic resource": "cluster.devices_per_node",
    "invalid feature": "legs.launcher.options",
    "unrecognized option": "legs.launcher.options",
    "invalid option": "legs.launcher.options",
    "invalid directive": "legs.launcher.options",
    "requires an argument": "legs.launcher.options",
    "invalid --": "legs.launcher.options",
    NO_SUCH_NODES: "cluster.nodes, legs.launcher.cpus_per_node or legs.launcher.memory_gigabytes",
}
"""Config keys by the words with which sbatch refuses what they request. Any other answer of sbatch may pass by itself."""


def submission_error(answer: str, request: LegRequest) -> queue.SlurmRefused | queue.SlurmUnavailable:
    """Error for a job that sbatch did not accept: SlurmRefused if the request is at fault, else SlurmUnavailable."""
    said = " ".join(answer.split())
    keys = next((keys for words, keys in REFUSALS.items() if words in said.lower()), None)
    if keys is None:
        return queue.SlurmUnavailable(f"{request.name} could not be submitted: {said}")
    if request.exclude and NO_SUCH_NODES in said:
        return queue.SlurmRefused(
            f"nodes: no node is left for {request.name}, since roll excludes {', '.join(request.exclude)} for failures "
            f"(roll nodes lists them): repair them, then roll nodes --clear NODE; SLURM says: {said}"
        )
    return queue.SlurmRefused(f"{keys}: SLURM refuses the job of a leg: {said}")


def node_shape(config: SlurmLauncherConfig, request: LegRequest) -> NodeShape:
    """Resources of each node of a requested leg, as Ray sees them."""
    gigabytes = config.object_store_gigabytes
    return NodeShape(
        devices=request.devices_per_node,
        gpus=request.gpus_per_node,
        object_store_bytes=int(gigabytes * 2**30) if gigabytes else None,
        time_limit_s=60.0 * request.time_limit_minutes,
    )


ALL_PROCESSORS = 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_ON_NODE"'
"""Shell line that gives the task of a node all CPUs of the job there. By default srun gives it one."""


def sbatch_parameters(config: SlurmLauncherConfig, request: LegRequest) -> dict[str, Any]:
    """Return a leg's sbatch options under the names that submitit uses."""
    memory = f"{config.memory_gigabytes}G" if config.memory_gigabytes else "0" if config.exclusive else None
    parameters = {
        "job_name": request.name,
        "nodes": request.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": request.gpus_per_node or None,
        "cpus_per_task": config.cpus_per_node,
        "mem": memory,
        "time": request.time_limit_minutes,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "exclusive": config.exclusive or None,
        "exclude": ",".join(request.exclude) or None,
        "signal_delay_s": config.signal_seconds,
        "stderr_to_stdout": True,
        "setup": [*(f"module load {module}" for module in config.modules), *config.setup, ALL_PROCESSORS],
        # One failed task ends the job. Tasks are not bound to cores: the kernel spreads the roles over all of the job's.
        "srun_args": ["--kill-on-bad-exit=1", "--cpu-bind=none"],
        "additional_parameters": {"requeue": True} | config.options,
        "wckey": "",
    }
    return {key: value for key, value in parameters.items() if value is not None}


REQUEUE_EXIT_CODE = 75
"""Exit code of `roll leg` that asks the sbatch script to requeue the job for the next leg (EX_TEMPFAIL of sysexits.h)."""
REQUEUE_COMMANDS = [
    "code=$?",
    f'case $code in {REQUEUE_EXIT_CODE} | 140 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac',
    "exit $code",
]
"""Last lines of the sbatch script. A requeued job keeps its sbatch options and its id, after which its run is named.

140 and 143 are SIGUSR2 and SIGTERM, from a signal that came before `roll leg` could handle signals.
"""


def sbatch_script(config: SlurmLauncherConfig, request: LegRequest, arguments: list[str]) -> str:
    """Return an sbatch script that requests a leg's resources, runs `roll leg ARGUMENTS` on every node, and requeues."""
    parameters = sbatch_parameters(config, request)
    parameters["setup"] = [*parameters["setup"], f'run="${{1:-{request.name}-job$SLURM_JOB_ID}}"']
    python = config.python or shlex.quote(sys.executable)
    command = f'{python} -m flows.cli leg {shlex.join(arguments)} --run "$run"'
    return _make_sbatch_string(command=command, folder=request.folder, teardown=REQUEUE_COMMANDS, **parameters)
