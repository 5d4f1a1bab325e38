"""Run `roll` as a process, kill one of the run's processes at a stage that the stage log names, and judge the result.

A command that survives a kill goes on to the next kill; one that ends is resumed, until the run is finished. Every command
is `roll resume`, including the first: the run is opened here, so that its id is known.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from roll_core.errors import RollError
from roll_core.reporting.stage_log import FILE_NAME, Edge, StageEvent, read_stages
from roll_core.store.records.runs import read_chain, read_config, store_of
from roll_core.types.manifest import Manifest
from roll_core.types.refs import RunRef
from tasks.durability import state_changing
from tasks.services import run_dir
from tests.chaos.kill_points import FLOW, RECOVER, KillPoint
from tests.chaos.outcomes import BrokenRun, Recovery, committed_after, differences, generated_again

POLL_S = 0.002
"""Seconds between polls of the stage log: a stage of a tiny run takes some tens of milliseconds."""
EXIT_DEADLINE_S = 180.0
"""Seconds within which a broken command must end or recover; a hang is worse than a failure."""


@dataclass(frozen=True)
class Fault:
    """Fault that happened to a run at a kill point, before the end of the run is known."""

    point: KillPoint
    at: datetime
    last_event: str
    """Last line of the stage log before the fault."""
    committed: list[Manifest]
    exit_code: int | None
    """Exit code of the command; None if it still runs."""
    error_line: str
    defects: tuple[str, ...]

    @property
    def survived(self) -> bool:
        """True if the command still runs, or ended well."""
        return self.exit_code in (None, 0) and not self.defects


@state_changing("unbroken {run.run_id}")
def run_unbroken(run: RunRef) -> list[StageEvent]:
    """Finish a run without breaking it and return its stage log."""
    finish(run)
    return read_stages(work_folder(run))


@state_changing("broken {run.run_id}")
def run_broken(run: RunRef, points: list[KillPoint], unbroken: RunRef) -> BrokenRun:
    """Kill a process at each point, resume where the command did not survive, and compare with an unbroken run."""
    faults: list[Fault] = []
    while len(faults) < len(points):
        met = kill_during_command(run, points[len(faults) :])
        if not met:
            break
        faults += met
    if len(faults) < len(points) or not faults[-1].survived:
        finish(run)
    return compare_with_unbroken(run, faults, points[len(faults) :], unbroken)


def kill_during_command(run: RunRef, points: Sequence[KillPoint]) -> list[Fault]:
    """Resume a run in one command and kill at as many of the points, in order, as the command meets.

    Stops after a kill that ends the command, and before a point that only the next command can meet.
    """
    faults: list[Fault] = []
    with command(run) as process:
        since = datetime.now(UTC)
        for point in points:
            if faults and point.stage == RECOVER:
                return faults  # only the next command recovers
            if not wait_for_stage(run, process, point, since):
                return faults
            faults.append(kill_at(run, process, point))
            if not faults[-1].survived:
                return faults
            since = faults[-1].at
        wait_until_finished(run, process)
    return faults


def kill_at(run: RunRef, process: subprocess.Popen[bytes], point: KillPoint) -> Fault:
    """Send SIGKILL to the victim and wait until the command has ended or recovered."""
    pids = pids_of_newest_leg(run) | {FLOW: process.pid}
    os.kill(pids[point.victim], signal.SIGKILL)
    at = datetime.now(UTC)
    return record_fault(run, process, point, at, wait_for_outcome(run, process, at))


def record_fault(
    run: RunRef, process: subprocess.Popen[bytes], point: KillPoint, at: datetime, defects: tuple[str, ...]
) -> Fault:
    """Collect what the store, the stage log and the command's log say about a fault, before the run continues."""
    before = [event for event in read_stages(work_folder(run)) if event.at <= at]
    last_event, exit_code = f"{before[-1].name} {before[-1].edge}", process.poll()
    error_line = last_log_line(run) if exit_code and point.victim != FLOW else ""
    return Fault(point, at, last_event, chain_of(run), exit_code, error_line, defects)


def finish(run: RunRef) -> None:
    """Resume a run and wait until it is finished."""
    with command(run) as process:
        wait_until_finished(run, process)


def wait_until_finished(run: RunRef, process: subprocess.Popen[bytes]) -> None:
    """Wait for a command that is not broken any more; raise `RollError` if it does not finish the run."""
    if process.wait():
        raise RollError(f"chaos: {run.run_id} could not be carried to its end: {last_log_line(run)}")


@contextlib.contextmanager
def command(run: RunRef) -> Iterator[subprocess.Popen[bytes]]:
    """Process of `roll resume`, which is killed at the end of the block if it still runs."""
    roll = str(Path(sys.executable).with_name("roll"))
    log_file = _command_log(run)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "wb") as log:
        process = subprocess.Popen([roll, "resume", run.run_id, "--store", run.store_uri], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_stage(run: RunRef, process: subprocess.Popen[bytes], point: KillPoint, since: datetime) -> bool:
    """Wait until the point's stage has begun and its delay has passed; return False if the command ended first."""
    has_begun = _if_log_grew(run, lambda: any(_begins(event, point, since) for event in read_stages(work_folder(run))))
    while not has_begun():
        if process.poll() is not None:
            return False
        time.sleep(POLL_S)
    time.sleep(point.delay_s)
    return process.poll() is None


def _begins(event: StageEvent, point: KillPoint, since: datetime) -> bool:
    return event.edge is Edge.BEGIN and event.name == point.event_name and event.at > since


def _if_log_grew(run: RunRef, condition: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap a condition on the stage log so that it is evaluated only when the log has grown.

    Polling must not take processor time from the run.
    """
    size = 0

    def holds() -> bool:
        nonlocal size
        new_size = sum(path.stat().st_size for path in work_folder(run).glob(f"leg-*/{FILE_NAME}"))
        size, grew = new_size, new_size > size
        return grew and condition()

    return holds


def wait_for_outcome(run: RunRef, process: subprocess.Popen[bytes], at: datetime) -> tuple[str, ...]:
    """Wait until a broken command has ended or recovered from the fault at a time; return defects of how it did."""
    has_recovered = _if_log_grew(run, lambda: committed_after(read_stages(work_folder(run)), at) is not None)
    ends_at = time.monotonic() + EXIT_DEADLINE_S
    while process.poll() is None:
        if has_recovered():
            return ()
        if time.monotonic() > ends_at:
            return (f"the command neither ended nor went on within {EXIT_DEADLINE_S:.0f} s",)
        time.sleep(POLL_S)
    return traceback_defect(run)


def wait_for_exit(run: RunRef, process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """Wait until a broken command has ended; return defects of how it did."""
    try:
        process.wait(EXIT_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return (f"the command did not end within {EXIT_DEADLINE_S:.0f} s",)
    return traceback_defect(run)


def traceback_defect(run: RunRef) -> tuple[str, ...]:
    return ("the command ended with a traceback",) if "Traceback" in _command_log(run).read_text() else ()


def compare_with_unbroken(run: RunRef, faults: Sequence[Fault], missed: Sequence[KillPoint], unbroken: RunRef) -> BrokenRun:
    """Compare a finished run with the unbroken one. A difference is counted for the last fault before it."""
    chain, expected = chain_of(run), chain_of(unbroken)
    until = [fault.point.iteration for fault in faults[1:]] + [len(expected)]
    events = read_stages(work_folder(run))
    recoveries = [
        Recovery(
            point=fault.point,
            last_event=fault.last_event,
            num_committed=len(fault.committed),
            num_lost=sum(manifest not in chain for manifest in fault.committed),
            survived=fault.survived,
            seconds=_seconds_to_commit(fault, events),
            error_line=fault.error_line,
            differences=(*fault.defects, *differences(expected[begin:end], chain[begin:end])),
        )
        for fault, begin, end in zip(faults, [0, *until[:-1]], until, strict=True)
    ]
    return BrokenRun(
        run_id=run.run_id,
        recoveries=tuple(recoveries),
        missed=tuple(missed),
        generated_again=generated_again(chain, events),
        num_collects=sum(event.stage == "collect" and event.edge is Edge.BEGIN for event in events),
    )


def _seconds_to_commit(fault: Fault, events: Sequence[StageEvent]) -> float | None:
    """Seconds from a fault to the first commit of an iteration that began after it, or of the leg that resumed the run."""
    if fault.survived:
        at = committed_after(events, fault.at)
    else:
        recovering = (event.at for event in events if event.name == RECOVER and event.edge is Edge.BEGIN)
        since = next((at for at in recovering if at > fault.at), fault.at)
        commits = (event.at for event in events if event.stage == "commit" and event.edge is Edge.END)
        at = next((at for at in commits if at > since), None)
    return None if at is None else (at - fault.at).total_seconds()


def chain_of(run: RunRef) -> list[Manifest]:
    """Committed manifests of a run, in order."""
    return read_chain(store_of(run), run.run_id)


@functools.cache
def work_folder(run: RunRef) -> Path:
    """Work folder of a run. Cached, because its config is in the store, which may be broken."""
    return run_dir(run, read_config(run))


def pids_of_newest_leg(run: RunRef) -> dict[str, int]:
    newest = max(work_folder(run).glob("leg-*/processes.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())


def _command_log(run: RunRef) -> Path:
    return work_folder(run) / "command.log"


def last_log_line(run: RunRef) -> str:
    """Last line, not blank, that the run's newest command printed."""
    lines = _command_log(run).read_text().splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")
