"""Whether a long run stays as light as it began: memory of every process, seconds and store requests per iteration.

    python -m benchmarks.soak [ITERATIONS] [FIGURE.png]

Runs `roll run` with rehearsed engines and trainer on a real S3 server. Compares the iterations around a tenth of the run to
the last ones, and exits with 1 if a quantity grew by more than 10 %. Takes about half an hour for 2,000 iterations on two
cores. Needs Linux.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.faulty_proxy import FaultyProxy
from tests.s3_server import S3Server
from tests.support import ROOT, write_tiny_run

POLL_S = 2.0
TOLERANCE = 1.10
"""Largest ratio of the end to the beginning that counts as flat."""
SMALL_MB = 5.0
"""Growth in MB below which a process counts as flat: allocators keep a few pages more or less."""


@dataclass(frozen=True)
class Sample:
    """State of the run at one poll."""

    at_s: float
    iteration: int
    requests: int
    """Requests to the store since the run began."""
    memory_mb: Mapping[str, float]
    """Unique set size by process name: what the machine would get back if the process ended."""


def main(arguments: list[str]) -> int:
    iterations = int(arguments[0]) if arguments else 2000
    samples = soak(iterations)
    if len(arguments) > 1:
        draw(samples, Path(arguments[1]))
    return report(samples, iterations)


def soak(iterations: int) -> list[Sample]:
    """Run to the end and return what was seen at each poll."""
    samples: list[Sample] = []
    with (
        tempfile.TemporaryDirectory(prefix="roll-soak-") as folder,
        S3Server(Path(folder) / "s3") as server,
        FaultyProxy(server.port) as proxy,
    ):
        os.environ.update(server.environment)
        config = write_tiny_run(
            Path(folder) / "soak.yaml",
            name="soak",
            iterations=iterations,
            store={"uri": server.new_store_uri(), "grace_minutes": 1},
            inference={"kind": "rehearsal", "seconds_per_token": 1e-4, "median_tokens": 5, "sigma": 0},
            training={"backend": "rehearsal"},
            evaluation={"every": 50, "num_problems": 8},
            checkpoint={"every": 50, "keep_last": 3},
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "run", str(config)], cwd=folder, env=environment, stdout=log, stderr=log
            )
            began_at = time.monotonic()
            while process.poll() is None:
                time.sleep(POLL_S)
                seen = Sample(
                    at_s=time.monotonic() - began_at,
                    iteration=num_commits(proxy),
                    requests=len(proxy.requests),
                    memory_mb=memory_of(process.pid),
                )
                samples.append(seen)
        if process.returncode:
            sys.exit(f"the run ended with {process.returncode}: {(Path(folder) / 'log').read_text()[-2000:]}")
    return samples


def num_commits(proxy: FaultyProxy) -> int:
    """Number of manifests that were written through a proxy."""
    return sum(method == "PUT" and "/iterations/" in path for method, path, _ in proxy.requests)


def memory_of(pid: int) -> dict[str, float]:
    """Unique set size in MB of a process and all its descendants; those of one name are added up."""
    found: dict[str, float] = defaultdict(float)
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            found[name_of(process)] += process.memory_full_info().uss / 1e6
    except psutil.NoSuchProcess:
        pass  # it ended while its memory was read
    return dict(found)


def name_of(process: psutil.Process) -> str:
    """Short name of a process. Example: tracking.uploader"""
    words = process.cmdline() or [process.name()]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return words[0].rpartition("/")[2].split(" ")[0]


def report(samples: Sequence[Sample], iterations: int) -> int:
    """Print the beginning against the end; return 1 if something grew."""
    early = [s for s in samples if iterations / 20 <= s.iteration <= iterations * 3 / 20]
    late = [s for s in samples if iterations * 17 / 20 <= s.iteration < iterations]
    rows = [
        ("seconds per iteration", rate([s.at_s for s in early], early), rate([s.at_s for s in late], late), 0.0),
        (
            "store requests per iteration",
            rate([s.requests for s in early], early),
            rate([s.requests for s in late], late),
            0.0,
        ),
    ]
    names = sorted({name for s in late for name in s.memory_mb} & {name for s in early for name in s.memory_mb})
    rows += [(f"MB of {name}", memory(early, name), memory(late, name), SMALL_MB) for name in names]
    print(f"| {iterations} iterations | around {iterations // 10} | at the end | ratio |\n|---|---:|---:|---:|")
    grown = []
    for name, before, after, slack in rows:
        grown += [name] if after > TOLERANCE * before + slack else []
        print(f"| {name} | {before:.3g} | {after:.3g} | {after / before:.2f} |")
    print(f"grew by more than {TOLERANCE - 1:.0%}: {', '.join(grown) or 'nothing'}")
    return 1 if grown else 0


def rate(quantity: Sequence[float], samples: Sequence[Sample]) -> float:
    """Increase of a cumulative quantity per iteration."""
    return (quantity[-1] - quantity[0]) / (samples[-1].iteration - samples[0].iteration)


def memory(samples: Sequence[Sample], name: str) -> float:
    """Median memory of a process in MB."""
    return median(s.memory_mb[name] for s in samples if name in s.memory_mb)


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw memory by process, and the times and requests so far, over the iterations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    iterations = [s.iteration for s in samples]
    names = sorted(
        {name for s in samples for name in s.memory_mb}, key=lambda name: -max(s.memory_mb.get(name, 0.0) for s in samples)
    )
    for name in names[:8]:
        left.plot(iterations, [s.memory_mb.get(name, float("nan")) for s in samples], label=name, linewidth=1)
    left.set(title="memory", xlabel="iteration", ylabel="MB (unique set size)")
    left.legend(fontsize=6)
    right.plot(iterations, [s.at_s / 60 for s in samples], label="minutes")
    right.plot(iterations, [s.requests / 1000 for s in samples], label="thousand store requests")
    right.set(title="since the run began", xlabel="iteration")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
