"""CPU seconds of a tiny run by process, from the command to the end of its last process. Start-up is nearly all of it.

    python -m benchmarks.run_cost [ROLL ARGUMENTS]

Needs Linux and a CPU. Runs `roll run` of a tiny config twice in a temporary folder, and prints the second time: the first
creates databases. With arguments, runs `roll` with them once. CPU seconds, unlike wall-clock seconds, stay comparable on a
busy machine. The last hundredths of a second of a process, after the last poll, are not counted.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT, write_tiny_run

POLL_S = 0.05
"""Seconds between two polls of all processes."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2), from linux/prctl.h."""


@dataclass(frozen=True)
class Process:
    """Process with the CPU seconds, user and system, that it had at the last poll."""

    command: str
    cpu_s: float


def main(arguments: list[str]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become children of this process
    with tempfile.TemporaryDirectory(prefix="roll-cost-") as folder:
        config = write_tiny_run(Path(folder) / "cost.yaml", name="cost", iterations=3)
        command = [sys.executable, "-m", "flows.cli", *(arguments or ["run", str(config)])]
        for _ in range(1 if arguments else 2):
            began_at = time.monotonic()
            processes = run_and_poll(command, folder)
            wall_s = time.monotonic() - began_at
    print("CPU seconds  process (those of at least 0.1 s)")
    for process in sorted(processes, key=lambda process: -process.cpu_s):
        if process.cpu_s >= 0.1:
            print(f"{process.cpu_s:11.1f}  {process.command[:100]}")
    print(f"{sum(process.cpu_s for process in processes):11.1f}  total, in {wall_s:.1f} s of wall-clock time")
    return 0


def run_and_poll(command: list[str], folder: str) -> list[Process]:
    """Run a command; return it and all its descendants once the last has ended."""
    processes: dict[tuple[int, str], Process] = {}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return list(processes.values())
        for pid, started, cpu_s in descendants(os.getpid()):
            known = processes.get((pid, started), Process("?", 0.0))
            processes[pid, started] = Process(command_line(pid) or known.command, cpu_s)
        time.sleep(POLL_S)


def descendants(root_pid: int) -> list[tuple[int, str, float]]:
    """Pid, start time in clock ticks since boot, and CPU seconds of every descendant of a process."""
    children, found = defaultdict(list), []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
        children[int(fields[1])].append((int(entry.parent.name), fields[19], cpu_s))
    pending = [root_pid]
    while pending:
        for process in children[pending.pop()]:
            found.append(process)
            pending.append(process[0])
    return found


def command_line(pid: int) -> str:
    """Command line of a process, without folders; empty once the process has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    except OSError:
        return ""
    return " ".join(word.rpartition("/")[2] for word in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
