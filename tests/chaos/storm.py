"""Storms: random signals to random processes of a run at random moments, while `roll gc` and `roll export` work beside it.

Kill points aim at stages of a leg. A storm aims at nothing. It therefore also meets the start of a leg, a recovery, a
checkpoint that is half stored, garbage collection and an export.
"""

import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from roll_core.types.manifest import Manifest
from roll_core.types.refs import Record, RunRef
from tasks.runs import open_run
from tests.chaos.kill_points import FLOW
from tests.chaos.outcomes import differences
from tests.chaos.process_kills import chain_of, command, pids_of_newest_leg, traceback_defect

MAX_PAUSE_S = 12.0
"""Maximum number of seconds between two events while a leg starts: about the time that it takes on two idle cores."""
MAX_COMMITS = 5
"""Maximum number of iterations that are committed between two events of a leg that has started."""
COMMIT_DEADLINE_S = 240.0
"""Seconds to wait for these iterations; a leg that was stopped in a bad moment may need a while to be replaced."""
MAX_STOPPED_S = 8.0
FINISH_DEADLINE_S = 600.0
GC_MINUTES = "0.05"
"""Age in minutes beyond which `roll gc` collects in a storm: shorter than an iteration lasts under one."""
BESIDE = ("gc", "export")
"""Commands that are started beside the run and killed."""
TOLD_TO_END = (signal.SIGTERM, signal.SIGUSR2)
"""Signals by which schedulers and people end a run; sent to the command and to the leg."""
ONE_RANK = "cluster={devices_per_node: 2, threads_per_device: 1}", "placement={trainer: [0], engines: [1]}"
TWO_RANKS = "cluster={devices_per_node: 3, threads_per_device: 1}", "placement={trainer: [0, 1], engines: [2]}"
VARIANTS = {
    "synchronous, one rank": ONE_RANK,
    "synchronous, two ranks": TWO_RANKS,
    "asynchronous, one rank": (*ONE_RANK, "rollout.async_ratio=2"),
    "asynchronous, two ranks": (*TWO_RANKS, "rollout.async_ratio=2"),
}
SETTINGS = ("iterations=40", "legs.max_failures=3", "checkpoint.every=3", "checkpoint.keep_last=2", "evaluation.every=5")


class Event(Record):
    """What happened to whom. Example: Event(victim="raylet", action="SIGSTOP", after_s=3.2, committed=4)"""

    victim: str
    action: str
    after_s: float
    """Seconds since the command started or the last event happened."""
    committed: int
    """Number of iterations, iteration 0 included, that were in the store."""


class Storm(Record):
    """A run that went through a storm, and how it differs from an unbroken one."""

    variant: str
    run_id: str
    events: tuple[Event, ...]
    num_commands: int
    differences: tuple[str, ...]


def run_storms(config: str, num_events: int, seed: int) -> Iterator[Storm]:
    """Run every variant of a config unbroken, then through storms that together have `num_events` events."""
    rng = random.Random(seed)
    for number, (variant, overrides) in enumerate(VARIANTS.items()):
        settings = [*SETTINGS, *overrides]
        unbroken = open_run(config, settings)
        finish_calmly(unbroken)
        missing = num_events // len(VARIANTS) + (number < num_events % len(VARIANTS))
        while missing:
            storm = run_storm(open_run(config, settings), variant, unbroken, missing, rng)
            missing -= len(storm.events)
            yield storm


def run_storm(run: RunRef, variant: str, unbroken: RunRef, max_events: int, rng: random.Random) -> Storm:
    """Send up to `max_events` signals to a run's processes, resuming it whenever its command ends; compare the result."""
    events: list[Event] = []
    defects: list[str] = []
    num_commands = 0
    while len(events) < max_events and not is_finished(run, unbroken):
        with command(run) as process:
            num_commands += 1
            happened = list(strike(run, process, max_events - len(events), rng))
        events += happened
        if not (happened and happened[-1].victim == FLOW):
            defects += traceback_defect(run)
    if not is_finished(run, unbroken):
        num_commands += 1
        finish_calmly(run)
    compare = compare_draws if "asynchronous" in variant else differences
    defects += compare(chain_of(unbroken), chain_of(run))
    return Storm(
        variant=variant, run_id=run.run_id, events=tuple(events), num_commands=num_commands, differences=tuple(defects)
    )


def strike(run: RunRef, process: subprocess.Popen[bytes], max_events: int, rng: random.Random) -> Iterator[Event]:
    """Make up to `max_events` events happen to a command; end when the command has ended."""
    for _ in range(max_events):
        began_at = time.monotonic()
        wait_for_moment(run, process, rng)
        if process.poll() is not None:
            return
        committed = len(chain_of(run))
        try:
            victim, action = make_event(run, process, rng)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue  # it ended between the drawing and the signal
        yield Event(victim=victim, action=action, after_s=time.monotonic() - began_at, committed=committed)


def wait_for_moment(run: RunRef, process: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Wait for the moment of the next event: one in three comes after some seconds, most likely while a leg starts, the
    others within a second after some iterations were committed. Returns early if the command ends."""
    if rng.random() < 1 / 3:
        _wait(process, rng.uniform(0.0, MAX_PAUSE_S))
        return
    wanted = len(chain_of(run)) + rng.randint(1, MAX_COMMITS)
    ends_at = time.monotonic() + COMMIT_DEADLINE_S
    while process.poll() is None and len(chain_of(run)) < wanted and time.monotonic() < ends_at:
        _wait(process, 0.1)
    _wait(process, rng.uniform(0.0, 1.0))


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a process, but no longer than some seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def make_event(run: RunRef, process: subprocess.Popen[bytes], rng: random.Random) -> tuple[str, str]:
    """Draw an event and make it happen. Returns the victim and what was done to it."""
    what = rng.choice(["kill", "kill", "kill", "stop", "end", *BESIDE])
    if what in BESIDE:
        return f"roll {what}", kill_beside(what, run, rng)
    victims = processes_of(run, process)
    if what == "end":
        name = rng.choice([name for name in victims if name in (FLOW, "leg")])
        sent = rng.choice(TOLD_TO_END)
        victims[name].send_signal(sent)
        return name, sent.name
    name = rng.choice(sorted(victims))
    if what == "kill":
        victims[name].kill()
        return name, "SIGKILL"
    return name, stop_for_a_while(victims[name], rng.uniform(0.5, MAX_STOPPED_S))


def processes_of(run: RunRef, process: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    """Processes that a command has started, and its own, by name. A leg that is starting has few of them yet."""
    named: dict[int, str] = {}
    with contextlib.suppress(ValueError):  # no leg has started its roles
        named = {pid: name for name, pid in pids_of_newest_leg(run).items()}
    found = {FLOW: psutil.Process(process.pid)}
    for child in found[FLOW].children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[named.get(child.pid) or _kind_of(child)] = child
    return found


def _kind_of(process: psutil.Process) -> str:
    """Short name of a process that processes.json does not list. Example: gcs_server"""
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return module or process.name()


def stop_for_a_while(process: psutil.Process, seconds: float) -> str:
    """Stop a process and let it continue after some seconds, as a machine does that swaps or is suspended."""
    process.suspend()
    try:
        time.sleep(seconds)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    return f"SIGSTOP for {seconds:.1f} s"


def kill_beside(what: str, run: RunRef, rng: random.Random) -> str:
    """Start `roll gc` or `roll export` on the run's store and kill it after a random time, unless it has ended by then."""
    roll = str(Path(sys.executable).with_name("roll"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "gc": ["gc", "--older-than", GC_MINUTES],
            "export": ["export", run.run_id, f"{folder}/export"],
        }[what]
        beside = subprocess.Popen(
            [roll, *arguments, "--store", run.store_uri], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            beside.wait(rng.uniform(2.0, 2 * MAX_PAUSE_S))
            return f"ended with {beside.returncode}"
        except subprocess.TimeoutExpired:
            beside.kill()
            beside.wait()
            return "SIGKILL"


def finish_calmly(run: RunRef) -> None:
    """Resume a run until it is finished."""
    with command(run) as process:
        if process.wait(FINISH_DEADLINE_S):
            raise AssertionError(f"{run.run_id} could not be finished after a storm: see its command.log")


def is_finished(run: RunRef, unbroken: RunRef) -> bool:
    """Tell whether a run has as many committed iterations as the unbroken one."""
    return len(chain_of(run)) == len(chain_of(unbroken))


def compare_draws(unbroken: Sequence[Manifest], broken: Sequence[Manifest]) -> list[str]:
    """Sentences about problems that an asynchronous run did not train on once, in the order of its draws.

    Which version of the policy answered depends on speed, so weights and rollouts differ between any two such runs.
    """
    if len(unbroken) != len(broken):
        return [f"{len(broken)} iterations were committed, unbroken {len(unbroken)}"]
    pairs = zip(unbroken, broken, strict=True)
    return [f"iteration {expected.iteration}: drew other problems" for expected, got in pairs if expected.draws != got.draws]


def storm_table(storms: Sequence[Storm]) -> str:
    """Markdown table with a row per run."""
    lines = ["| variant | events | commands | differences |", "| --- | --- | --- | --- |"]
    lines += [f"| {s.variant} | {len(s.events)} | {s.num_commands} | {len(s.differences)} |" for s in storms]
    return "\n".join(lines)


def event_table(storms: Sequence[Storm]) -> str:
    """Markdown table with a row per event."""
    lines = ["| variant | victim | action | committed before |", "| --- | --- | --- | --- |"]
    lines += [f"| {s.variant} | {e.victim} | {e.action} | {e.committed} |" for s in storms for e in s.events]
    return "\n".join(lines)
