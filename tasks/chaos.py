"""Breaking runs on purpose: the `roll` command as a process, killed at a stage its log names, and resumed until it is done.

Every leg is started by `roll resume`, the first one too: a run is opened here, so that its name is known.
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
from roll_core.reporting.chaos import FLOW, RECOVER, BrokenRun, KillPoint, Recovery, differences, generated_again
from roll_core.reporting.stage_log import FILE_NAME, Edge, StageEvent, read_stages
from roll_core.store.runs import read_chain, read_config, store_of
from roll_core.types.manifest import Manifest
from roll_core.types.refs import RunRef
from tasks.durability import state_changing
from tasks.services import run_dir

LOOK_S = 0.002
"""How often the stage log is looked at: a stage of a tiny run takes some tens of milliseconds."""
END_DEADLINE_S = 180.0
"""Within which a command must end whose leg was broken; a hang is worse than a failure."""


@dataclass(frozen=True)
class Fault:
    """Something that happened to a run at a point, before its end is known."""

    point: KillPoint
    at: datetime
    found: str
    committed: list[Manifest]
    said: str
    trouble: tuple[str, ...]


@state_changing("unbroken {run.run_id}")
def run_unbroken(run: RunRef) -> list[StageEvent]:
    """Carry a run to its end, and answer what it did."""
    finish(run)
    return read_stages(folder_of(run))


@state_changing("broken {run.run_id}")
def run_broken(run: RunRef, points: list[KillPoint], unbroken: RunRef) -> BrokenRun:
    """Kill somebody at each point, resume after each, and compare what came out with a run that never broke."""
    faults = []
    for point in points:
        fault = kill_at(run, point)
        if fault is None:
            break
        faults.append(fault)
    finish(run)
    return judge(run, faults, points[len(faults) :], unbroken)


def kill_at(run: RunRef, point: KillPoint) -> Fault | None:
    """Carry a run on until a point, SIGKILL the victim there, and wait for the command to end. None: it never came by."""
    with command(run) as process:
        if not wait_for_stage(run, process, point, datetime.now(UTC)):
            return None
        pids = _processes(run) | {FLOW: process.pid}
        os.kill(pids[point.victim], signal.SIGKILL)
        at = datetime.now(UTC)
        trouble = wait_for_end(run, process)
        return fault_of(run, point, at, "" if point.victim == FLOW else last_words(run), trouble)


def fault_of(run: RunRef, point: KillPoint, at: datetime, said: str, trouble: tuple[str, ...]) -> Fault:
    """What the store and the log say of a run that was broken, before it goes on."""
    before = [event for event in read_stages(folder_of(run)) if event.at <= at]
    return Fault(point, at, f"{before[-1].name} {before[-1].edge}", chain_of(run), said, trouble)


def finish(run: RunRef) -> None:
    """Carry a run to its end; that it does not get there is an error."""
    with command(run) as process:
        process.wait()
    if process.returncode:
        raise RollError(f"chaos: {run.run_id} could not be carried to its end: {last_words(run)}")


@contextlib.contextmanager
def command(run: RunRef) -> Iterator[subprocess.Popen[bytes]]:
    """`roll resume` of a run; it does not outlive the block."""
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
    """Sleep until a stage has begun and its delay has passed; False if the command ended first."""
    look = _when_changed(run, lambda: any(_begins(event, point, since) for event in read_stages(folder_of(run))))
    while not look():
        if process.poll() is not None:
            return False
        time.sleep(LOOK_S)
    time.sleep(point.delay_s)
    return process.poll() is None


def _begins(event: StageEvent, point: KillPoint, since: datetime) -> bool:
    return event.edge is Edge.BEGIN and event.name == point.begins_as and event.at > since


def _when_changed(run: RunRef, question: Callable[[], bool]) -> Callable[[], bool]:
    """Ask only when the stage log has grown: looking must not cost the run its processors."""
    size = 0

    def look() -> bool:
        nonlocal size
        sizes = sum(path.stat().st_size for path in folder_of(run).glob(f"leg-*/{FILE_NAME}"))
        size, grown = sizes, sizes > size
        return grown and question()

    return look


def wait_for_end(run: RunRef, process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """Wait for a broken command to end; what was wrong with how it did."""
    try:
        process.wait(END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return (f"the command did not end within {END_DEADLINE_S:.0f} s",)
    return ("the command ended with a traceback",) if "Traceback" in _command_log(run).read_text() else ()


def judge(run: RunRef, faults: Sequence[Fault], missed: Sequence[KillPoint], unbroken: RunRef) -> BrokenRun:
    """Compare a finished run with the unbroken one: each fault answers for what follows it, up to the next."""
    chain, expected = chain_of(run), chain_of(unbroken)
    until = [fault.point.iteration for fault in faults[1:]] + [len(expected)]
    events = read_stages(folder_of(run))
    recoveries = [
        Recovery(
            point=fault.point,
            found=fault.found,
            num_committed=len(fault.committed),
            num_lost=sum(manifest not in chain for manifest in fault.committed),
            seconds=_seconds_to_commit(fault, events),
            said=fault.said,
            differences=(*fault.trouble, *differences(expected[begin:end], chain[begin:end])),
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
    """From a fault to the end of the next commit; if a leg had to recover from it, to that leg's first."""
    recoveries = (event.at for event in events if event.name == RECOVER and event.edge is Edge.BEGIN)
    since = next((at for at in recoveries if at > fault.at), fault.at)
    commits = (event.at for event in events if event.stage == "commit" and event.edge is Edge.END)
    return next(((at - fault.at).total_seconds() for at in commits if at > since), None)


def chain_of(run: RunRef) -> list[Manifest]:
    return read_chain(store_of(run), run.run_id)


@functools.cache
def folder_of(run: RunRef) -> Path:
    """A run's scratch, asked for once: the store may be what is broken."""
    return run_dir(run, read_config(run))


def _processes(run: RunRef) -> dict[str, int]:
    """Of the newest leg."""
    newest = max(folder_of(run).glob("leg-*/processes.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())


def _command_log(run: RunRef) -> Path:
    return folder_of(run) / "command.log"


def last_words(run: RunRef) -> str:
    lines = _command_log(run).read_text().splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")
