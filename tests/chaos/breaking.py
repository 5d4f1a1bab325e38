"""Breaking runs on purpose: the `roll` command as a process, somebody in it killed at a stage its log names. A command that
gets over it is left to go on, to the next kill; one that ends is resumed, until the run is done.

Every command is `roll resume`, the first one too: a run is opened here, so that its name is known.
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
from tests.chaos.kill_points import (
    FLOW,
    RECOVER,
    BrokenRun,
    KillPoint,
    Recovery,
    committed_after,
    differences,
    generated_again,
)

LOOK_S = 0.002
"""How often the stage log is looked at: a stage of a tiny run takes some tens of milliseconds."""
END_DEADLINE_S = 180.0
"""Within which a command must end, or go on, whose leg was broken; a hang is worse than a failure."""


@dataclass(frozen=True)
class Fault:
    """Something that happened to a run at a point, before its end is known."""

    point: KillPoint
    at: datetime
    found: str
    committed: list[Manifest]
    exit_code: int | None
    """Of the command; None if it goes on."""
    said: str
    trouble: tuple[str, ...]

    @property
    def survived(self) -> bool:
        return self.exit_code in (None, 0) and not self.trouble


@state_changing("unbroken {run.run_id}")
def run_unbroken(run: RunRef) -> list[StageEvent]:
    """Carry a run to its end, and answer what it did."""
    finish(run)
    return read_stages(folder_of(run))


@state_changing("broken {run.run_id}")
def run_broken(run: RunRef, points: list[KillPoint], unbroken: RunRef) -> BrokenRun:
    """Kill somebody at each point, resume where that was not survived, and compare what came out with a run that never
    broke."""
    faults: list[Fault] = []
    while len(faults) < len(points):
        met = break_command(run, points[len(faults) :])
        if not met:
            break
        faults += met
    if len(faults) < len(points) or not faults[-1].survived:
        finish(run)
    return judge(run, faults, points[len(faults) :], unbroken)


def break_command(run: RunRef, points: Sequence[KillPoint]) -> list[Fault]:
    """Carry a run on in one command that meets as many of the points as it can: until one of them ends it, or is none of
    its own."""
    faults: list[Fault] = []
    with command(run) as process:
        since = datetime.now(UTC)
        for point in points:
            if faults and point.stage == RECOVER:
                return faults  # the next command's
            if not wait_for_stage(run, process, point, since):
                return faults
            faults.append(kill_at(run, process, point))
            if not faults[-1].survived:
                return faults
            since = faults[-1].at
        wait_until_finished(run, process)
    return faults


def kill_at(run: RunRef, process: subprocess.Popen[bytes], point: KillPoint) -> Fault:
    """SIGKILL the victim, and wait until it is known what comes of it."""
    pids = _processes(run) | {FLOW: process.pid}
    os.kill(pids[point.victim], signal.SIGKILL)
    at = datetime.now(UTC)
    trouble = wait_for_outcome(run, process, at)
    return fault_of(run, process, point, at, trouble)


def fault_of(
    run: RunRef, process: subprocess.Popen[bytes], point: KillPoint, at: datetime, trouble: tuple[str, ...]
) -> Fault:
    """What the store, the log and the command say of a run that was broken, before it goes on."""
    before = [event for event in read_stages(folder_of(run)) if event.at <= at]
    found, exit_code = f"{before[-1].name} {before[-1].edge}", process.poll()
    said = last_words(run) if exit_code and point.victim != FLOW else ""
    return Fault(point, at, found, chain_of(run), exit_code, said, trouble)


def finish(run: RunRef) -> None:
    """Carry a run to its end."""
    with command(run) as process:
        wait_until_finished(run, process)


def wait_until_finished(run: RunRef, process: subprocess.Popen[bytes]) -> None:
    """Wait for a command that nobody is going to break any more; that it does not finish the run is an error."""
    if process.wait():
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


def wait_for_outcome(run: RunRef, process: subprocess.Popen[bytes], at: datetime) -> tuple[str, ...]:
    """Wait until a command has ended that was broken, or has got over it; what was wrong with how it did."""
    look = _when_changed(run, lambda: committed_after(read_stages(folder_of(run)), at) is not None)
    ends_at = time.monotonic() + END_DEADLINE_S
    while process.poll() is None:
        if look():
            return ()
        if time.monotonic() > ends_at:
            return (f"the command neither ended nor went on within {END_DEADLINE_S:.0f} s",)
        time.sleep(LOOK_S)
    return _traceback(run)


def wait_for_end(run: RunRef, process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """Wait for a broken command to end; what was wrong with how it did."""
    try:
        process.wait(END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return (f"the command did not end within {END_DEADLINE_S:.0f} s",)
    return _traceback(run)


def _traceback(run: RunRef) -> tuple[str, ...]:
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
            survived=fault.survived,
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
    """Until an iteration was committed that had all of it before it, or that came first in the leg that took over."""
    if fault.survived:
        at = committed_after(events, fault.at)
    else:
        recovering = (event.at for event in events if event.name == RECOVER and event.edge is Edge.BEGIN)
        since = next((at for at in recovering if at > fault.at), fault.at)
        commits = (event.at for event in events if event.stage == "commit" and event.edge is Edge.END)
        at = next((at for at in commits if at > since), None)
    return None if at is None else (at - fault.at).total_seconds()


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
