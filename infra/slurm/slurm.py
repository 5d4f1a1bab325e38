"""A leg as a SLURM job: one task a node, each of which runs `node.run_node`. It outlives whoever submitted it."""

import contextlib
import io
import shlex
import sys
import time
from collections.abc import Callable
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


class SlurmLauncher:
    def __init__(self, config: SlurmLauncherConfig):
        self._config = config

    def submit(self, request: LegRequest, leg: LegFunction) -> "SlurmLegJob":
        return self._submit(request, run_node, cloudpickle.dumps(leg), node_shape(self._config, request), request.folder)

    def submit_elastic(self, request: LegRequest, run_folder: Path) -> "SlurmLegJob":
        """A node more for the legs of a run."""
        return self._submit(request, join_legs, node_shape(self._config, request), run_folder)

    def _submit(self, request: LegRequest, function: Callable[..., NodeReport | None], *arguments: Any) -> "SlurmLegJob":
        executor = submitit.SlurmExecutor(folder=request.folder, max_num_timeout=0, python=self._config.python)
        executor.update_parameters(**sbatch_parameters(self._config, request))
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
                job = executor.submit(function, *arguments)
        except FailedJobError as error:
            raise queue.SlurmUnavailable(f"{request.name} could not be submitted: {' '.join(str(error).split())}") from None
        return self.attach(job.job_id, request.folder)

    def find(self, prefix: str) -> dict[str, str]:
        return queue.find_jobs(prefix)

    def attach(self, job_id: str, folder: Path) -> "SlurmLegJob":
        return SlurmLegJob(job_id, folder)


class SlurmLegJob:
    poll_s = 2.0
    """Everybody's jobs are asked for at one controller."""

    def __init__(self, job_id: str, folder: Path):
        self.job_id = job_id
        self._paths = JobPaths(folder, job_id=job_id, task_id=0)
        self.log = Path(self._paths.stdout)
        self._state = queue.JobState("UNKNOWN")

    def describe(self) -> str:
        return queue.job_state(self.job_id).describe(time.time())

    def has_ended(self) -> bool:
        """By SLURM's word alone: a job that has answered may have been requeued before it was quite gone, and goes on."""
        try:
            self._state = queue.job_state(self.job_id)
        except queue.SlurmUnavailable:
            return False
        return self._state.is_over or self._state == queue.FORGOTTEN

    @property
    def nodes(self) -> str:
        """Where it ran when it was last asked whether it has ended, as SLURM writes it; empty if it did not."""
        return self._state.nodes if self._state.name == "RUNNING" else ""

    def end(self) -> JobEnd:
        return read_end(self._state, self._outcome())

    def cancel(self) -> None:
        queue.cancel_job(self.job_id)

    def _outcome(self) -> NodeReport | str | None:
        """What the first node reported, or the traceback of what prevented that."""
        if not self._paths.result_pickle.exists():
            return None
        return pickle_load(self._paths.result_pickle)[1]


def read_end(state: queue.JobState, outcome: NodeReport | str | None) -> JobEnd:
    """How a job ended, by SLURM's word and the first node's report."""
    seen = queue.ENDED.get(state.name)
    told = f"SLURM says {state.name}" + (f" ({state.reason})" if state.reason not in ("", "None") else "")
    match outcome:
        case NodeReport():
            lost = outcome.lost_nodes or state.lost_nodes
            if seen is None and lost:
                seen = LegEnding.NODE_FAIL
            if seen is None and outcome.signalled and outcome.answer is None:
                seen = LegEnding.PREEMPTED
            return JobEnd(seen, outcome.answer, "; ".join(filter(None, [outcome.cause, told])), lost)
        case str():
            return JobEnd(seen, None, f"the leg's job failed ({last_line(outcome)}); {told}", state.lost_nodes)
        case None:
            return JobEnd(seen, None, f"the leg's job left no answer; {told}", state.lost_nodes)


def node_shape(config: SlurmLauncherConfig, request: LegRequest) -> NodeShape:
    gigabytes = config.object_store_gigabytes
    return NodeShape(request.devices_per_node, request.gpus_per_node, int(gigabytes * 2**30) if gigabytes else None)


ALL_PROCESSORS = 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_ON_NODE"'
"""A task would have one of those that the job has on its node."""


def sbatch_parameters(config: SlurmLauncherConfig, request: LegRequest) -> dict[str, Any]:
    """What a leg asks of SLURM, in submitit's words."""
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
        # One lost task ends all. Roles find their processors by themselves.
        "srun_args": ["--kill-on-bad-exit=1", "--cpu-bind=none"],
        "additional_parameters": {"requeue": True} | config.options,
        "wckey": "",
    }
    return {key: value for key, value in parameters.items() if value is not None}


CHAINED = 75
"""Exit code of a leg after which the next should follow; that of a temporary failure, by sysexits.h."""
CHAIN = ["code=$?", f'if [ $code -eq {CHAINED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi', "exit $code"]
"""The same job again: with the options it was submitted with, and the id by which its run is named."""


def sbatch_script(config: SlurmLauncherConfig, request: LegRequest, arguments: list[str]) -> str:
    """A script that asks for what a leg asks for, runs `roll leg ARGUMENTS` on every node, and chains itself."""
    parameters = sbatch_parameters(config, request)
    parameters["setup"] = [*parameters["setup"], f'run="${{1:-{request.name}-job$SLURM_JOB_ID}}"']
    python = config.python or shlex.quote(sys.executable)
    command = f'{python} -m flows.cli leg {shlex.join(arguments)} --run "$run"'
    return _make_sbatch_string(command=command, folder=request.folder, teardown=CHAIN, **parameters)
