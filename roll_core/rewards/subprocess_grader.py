"""Subprocesses for graders that may hang or crash. An answer that takes too long costs its process and its trajectory, never
the reward worker.

A subprocess runs this module with the name of a grading module. The `load_grader()` of that module does the slow imports and
returns a function from a request to a `Score`. Requests and replies are lines of JSON. A process is started on first use and
handles one request at a time. It gets no keys or passwords from the environment. Beyond that it is guarded against
accidents, not malice: a grader that evaluates what a policy wrote does so with the rights of the run.
"""

import asyncio
import importlib
import json
import os
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

from roll_core.config.rewards import SubprocessGrading
from roll_core.errors import RewardError, one_line
from roll_core.types.trajectory import Problem, Score

GradeFunction = Callable[[dict[str, str]], Score]
"""Grading function of a subprocess: request -> score."""
START_TIMEOUT_S = 120.0
"""Seconds for the imports of a grader from a slow disk; usually 1 to 4 s. A timeout is retried as a transient fault."""
MEMORY_BYTES = 4 * 2**30
"""Limit of the address space of a subprocess: 9**9**9**9 ends in a MemoryError, not in all memory of the machine."""
ORPHAN_SECONDS = 5.0
"""Seconds beyond its deadline after which a request kills its process itself, if the reward worker is gone."""
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
"""Environment variables that a subprocess gets from its reward worker. The others hold keys and passwords (AWS, Prefect,
MLflow, Ray), and a grader may evaluate what a policy wrote."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment that turns off numpy's thread pools: each thread reserves address space, much with many cores."""
MAX_LINE_BYTES = 2**24
"""Maximum bytes of a reply. A score takes a few dozen; an error message may be long."""


class SubprocessGrader:
    """Pool of up to `config.processes` subprocesses that grade with one module; a failed process is replaced."""

    def __init__(self, reward: str, module: str, config: SubprocessGrading):
        """Create an empty pool. `reward` is for error messages; `module` is the import name of a module with
        `load_grader`."""
        self._reward, self._module, self._config = reward, module, config
        self._idle: list[Process] = []
        self._started: list[Process] = []
        """Every process that was not seen to end."""
        self._slots = asyncio.Semaphore(config.processes)

    async def grade(self, problem: Problem, request: dict[str, str]) -> Score:
        """Return the score of one request, or raise RewardError that says what went wrong."""
        async with self._slots:
            process = self._idle.pop() if self._idle else await self._start()
            line = b""
            try:
                line = await asyncio.wait_for(_exchange(process, request), self._config.deadline_seconds)
            except TimeoutError:
                limit = f"reward.deadline_seconds ({self._config.deadline_seconds:g})"
                raise RewardError(self._reward, problem.problem_id, f"it took longer than {limit}") from None
            finally:
                if line.endswith(b"\n"):
                    self._idle.append(process)
                else:  # late, dead, or cancelled in the middle of a request
                    _kill(process)
        if not line.endswith(b"\n"):
            raise RewardError(self._reward, problem.problem_id, "its process died of it")
        reply = json.loads(line)
        if "failure" in reply:
            raise RewardError(self._reward, problem.problem_id, reply["failure"])
        return Score(reply["value"], reply["correct"])

    async def close(self) -> None:
        """End all subprocesses; what is being graded fails."""
        for process in self._started:
            _kill(process)
            await process.wait()
        self._started.clear()
        self._idle.clear()

    async def _start(self) -> Process:
        """Start a subprocess and wait until its imports are done."""
        self._started = [process for process in self._started if process.returncode is None]
        seconds = self._config.deadline_seconds + ORPHAN_SECONDS
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "roll_core.rewards.subprocess_grader", self._module, str(seconds)),
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_LINE_BYTES,
            env=_environment(),
        )
        self._started.append(process)
        assert process.stdout is not None
        try:
            started = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        except BaseException:
            _kill(process)
            raise
        if not started:
            raise ConnectionError(f"the process of reward '{self._reward}' died while starting")
        return process


def _environment() -> dict[str, str]:
    """Environment of a subprocess: what a Python program needs, and nothing else."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return passed_on | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


async def _exchange(process: Process, request: dict[str, str]) -> bytes:
    """Send a request and return the reply line; empty if the process died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return b""
    return await process.stdout.readline()


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()


def serve(module: str, seconds: float) -> None:
    """Reply to requests from stdin until it is closed; a request that runs for `seconds` kills the process."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a grader prints goes to stderr, not among the replies
    grade: GradeFunction = importlib.import_module(module).load_grader()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies.write("started\n")
    replies.flush()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM kills the process, whatever it is doing
        try:
            score = grade(json.loads(line))
            reply: dict[str, object] = {"value": score.value, "correct": score.correct}
        except Exception as error:  # boundary to foreign grading code
            reply = {"failure": one_line(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
