"""Graders that may hang or crash, in processes of their own: an answer that takes too long costs its process and its
trajectory, never the reward worker.

A process is this module run with the name of a grading module, whose `load_grader()` imports what takes long and answers
with a function from a request to a `Score`. Requests and answers are lines of JSON. A process is started when it is first
needed and has one answer at a time. This guards against accidents, not malice: a grader that evaluates what a policy wrote
does so with the rights of the run.
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

Grade = Callable[[dict[str, str]], Score]
START_SECONDS = 120.0
"""For the imports of a grader, from a slow disk; they take 1 to 4 s. Being late counts as passing: it is tried again."""
MEMORY_BYTES = 4 * 2**30
"""Address space of a process: 9**9**9**9 ends in a MemoryError rather than in all memory of the machine."""
ORPHAN_SECONDS = 5.0
"""How much longer than its deadline an answer runs whose reward worker is gone and cannot end it."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Threads of numpy's would take up address space, each its share, on a machine with many cores."""
LONGEST_LINE = 2**24
"""Bytes; an answer is a few dozen, unless it says at length what went wrong."""


class SubprocessGrader:
    """Grades with one module in up to `config.processes` processes; one that fails is replaced."""

    def __init__(self, reward: str, module: str, config: SubprocessGrading):
        self._reward, self._module, self._config = reward, module, config
        self._idle: list[Process] = []
        self._turns = asyncio.Semaphore(config.processes)

    async def grade(self, problem: Problem, request: dict[str, str]) -> Score:
        """The score of one request, or RewardError saying what went wrong with it."""
        async with self._turns:
            process = self._idle.pop() if self._idle else await self._start()
            line = b""
            try:
                line = await asyncio.wait_for(_ask(process, request), self._config.deadline_seconds)
            except TimeoutError:
                limit = f"reward.deadline_seconds ({self._config.deadline_seconds:g})"
                raise RewardError(self._reward, problem.problem_id, f"it took longer than {limit}") from None
            finally:
                if line.endswith(b"\n"):
                    self._idle.append(process)
                else:  # late, dead or, where this was cancelled, in the middle of an answer
                    _end(process)
        if not line.endswith(b"\n"):
            raise RewardError(self._reward, problem.problem_id, "its process died of it")
        answer = json.loads(line)
        if "failure" in answer:
            raise RewardError(self._reward, problem.problem_id, answer["failure"])
        return Score(answer["value"], answer["correct"])

    async def _start(self) -> Process:
        seconds = self._config.deadline_seconds + ORPHAN_SECONDS
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "roll_core.rewards.subprocess_grader", self._module, str(seconds)),
            stdin=PIPE,
            stdout=PIPE,
            limit=LONGEST_LINE,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        try:
            started = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        except BaseException:
            _end(process)
            raise
        if not started:
            raise ConnectionError(f"the process of reward '{self._reward}' died while starting")
        return process


async def _ask(process: Process, request: dict[str, str]) -> bytes:
    """The line that answers; empty if the process died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return b""
    return await process.stdout.readline()


def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()


def serve(module: str, seconds: float) -> None:
    """Answer requests until there are no more; a request that runs for `seconds` ends the process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a grader prints is no answer
    grade: Grade = importlib.import_module(module).load_grader()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers.write("started\n")
    answers.flush()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends the process, whatever that is doing
        try:
            score = grade(json.loads(line))
            answer: dict[str, object] = {"value": score.value, "correct": score.correct}
        except Exception as error:  # the boundary to what grades
            answer = {"failure": one_line(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
