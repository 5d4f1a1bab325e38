"""Processor seconds of a tiny run, from the command to its last process, by process: nearly all of it is starting.

    python -m benchmarks.run_cost [ROLL ARGUMENTS]

Linux. By default runs a tiny config in a folder of its own, twice, since the first time makes databases; prints the second.
Processor time is what a busy machine leaves comparable. A process's last hundredths between two looks are not seen.
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

from tests.support import ROOT

CONFIG = """
extends: {root}/configs/clusters/laptop.yaml
name: cost
iterations: 3
model: {{kind: scratch, max_positions: 32}}
problems: {{kind: arithmetic, puzzle: sort, digits: 3}}
reward: {{kind: exact_match}}
rollout: {{num_groups: 4, group_size: 4, max_new_tokens: 5}}
evaluation: {{num_problems: 8}}
"""
LOOK_S = 0.05
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    command: str
    cpu_s: float


def main(arguments: list[str]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # who loses its parent is still found below us
    with tempfile.TemporaryDirectory(prefix="roll-cost-") as folder:
        config = Path(folder) / "cost.yaml"
        config.write_text(CONFIG.format(root=ROOT))
        command = [sys.executable, "-m", "flows.cli", *(arguments or ["run", str(config)])]
        for _ in range(1 if arguments else 2):
            began_at = time.monotonic()
            processes = watched(command, folder)
            wall_s = time.monotonic() - began_at
    for process in sorted(processes, key=lambda process: -process.cpu_s):
        if process.cpu_s >= 0.1:
            print(f"{process.cpu_s:7.1f}  {process.command[:100]}")
    print(f"{sum(process.cpu_s for process in processes):7.1f}  processor seconds in all, {wall_s:.1f} s by the clock")
    return 0


def watched(command: list[str], folder: str) -> list[Process]:
    """Every process that a command starts, and theirs, when the last has ended."""
    seen: dict[tuple[int, str], Process] = {}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return list(seen.values())
        for pid, started, cpu_s in descendants(os.getpid()):
            seen[pid, started] = Process(said_of(pid) or seen.get((pid, started), Process("?", 0.0)).command, cpu_s)
        time.sleep(LOOK_S)


def descendants(of: int) -> list[tuple[int, str, float]]:
    """Number, time of start and processor seconds of each."""
    children, found = defaultdict(list), []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children[int(fields[1])].append((int(entry.parent.name), fields[19], (int(fields[11]) + int(fields[12])) / TICKS))
    waiting = [of]
    while waiting:
        for process in children[waiting.pop()]:
            found.append(process)
            waiting.append(process[0])
    return found


def said_of(pid: int) -> str:
    """Its command, without folders: nothing is left of it once it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    except OSError:
        return ""
    return " ".join(word.rpartition("/")[2] for word in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
