"""CPU time and memory of the rollout scheduler per attempt, with 1,000 to 100,000 attempts in flight.

    python -m benchmarks.scheduler_scale [--attempts 1000 10000 100000] [--repeats 3]

Needs a CPU only. Runs one collect in this process against engines and graders that take no time. The cost left is that of
the scheduler, its router, the lifecycle, rendering and trajectories. All attempts of the first draw are in flight before the
first one ends; every fourth group is filtered and replaced. Prints per generated attempt: microseconds of CPU time (the
fastest of the repeats), and bytes at the peak (in a separate collect, since tracing memory takes time).
"""

import argparse
import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import dataclass

from roll_core.config.problems import ArithmeticProblems
from roll_core.config.rollout import GroupFilter, RolloutConfig
from roll_core.data.arithmetic import ArithmeticSource
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.renderer import CharacterRenderer
from roll_core.rollout.scheduler import RolloutScheduler
from roll_core.types.manifest import CollectRequest
from roll_core.types.trajectory import Ending, Problem, Score, Trajectory

GROUP_SIZE = 8
NUM_ENGINES = 8
COMPLETIONS_PER_REPLY = 32
"""Completions that an engine returns at a time."""
TARGET_MICROSECONDS = 200.0
"""Most CPU microseconds per attempt."""
MAX_GROWTH = 2.0
"""Largest allowed ratio between the costs of an attempt at different numbers in flight."""
TOKENS = (4, 6, 8, 10, 1)
LOGPROBS, VERSIONS = (-0.5,) * len(TOKENS), (0,) * len(TOKENS)


@dataclass
class InstantEngine:
    """Engine client that returns the same completion for every request at once."""

    name: str
    num_requests: int = 0

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        self.num_requests += len(requests)
        for start in range(0, len(requests), COMPLETIONS_PER_REPLY):
            await asyncio.sleep(0)
            part = requests[start : start + COMPLETIONS_PER_REPLY]
            yield [Completion(request.request_id, TOKENS, LOGPROBS, VERSIONS, Ending.STOP) for request in part]

    async def abort(self, request_ids: list[str]) -> None: ...


@dataclass
class InstantGrader:
    """Grader client that scores at once; every fourth group gets equal rewards."""

    name: str

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> AsyncIterator[list[tuple[int, Score]]]:
        yield [(index, Score(float(t.attempt % 2 and t.group % 4 > 0), False)) for index, (_, t) in enumerate(items)]


@dataclass(frozen=True)
class Cost:
    """Cost per generated attempt with `num_attempts` in flight."""

    num_attempts: int
    microseconds: float
    num_bytes: float


def collect(num_attempts: int) -> tuple[float, int]:
    """Collect one batch; return CPU seconds and the number of attempts generated."""
    num_groups = num_attempts // GROUP_SIZE
    engines = [InstantEngine(f"engine {number}") for number in range(NUM_ENGINES)]
    scheduler = RolloutScheduler(
        RolloutConfig(
            num_groups=num_groups,
            group_size=GROUP_SIZE,
            slots_per_engine=num_attempts // NUM_ENGINES,
            filter=GroupFilter(equal_rewards=True),
        ),
        seed=0,
        max_positions=4096,
        source=ArithmeticSource(ArithmeticProblems(digits=5), seed=0),
        renderer=CharacterRenderer(),
        engines=engines,
        graders=[InstantGrader("grader 0"), InstantGrader("grader 1")],
    )
    request = CollectRequest(iteration=1, parent="", weights_version=0, first_problem=0, num_groups=num_groups)
    gc.collect()
    start = time.process_time()
    rollout = asyncio.run(scheduler.collect(request, deadline_s=3600.0))
    seconds = time.process_time() - start
    assert len(rollout.trajectories) == num_groups * GROUP_SIZE
    return seconds, sum(engine.num_requests for engine in engines)


def measure(num_attempts: int, repeats: int) -> Cost:
    """Collect several times for the CPU time, and once more for the memory."""
    runs = [collect(num_attempts) for _ in range(repeats)]
    gc.collect()
    tracemalloc.start()
    _, generated = collect(num_attempts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Cost(num_attempts, 1e6 * min(seconds / count for seconds, count in runs), peak / generated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    collect(1_000)  # imports and caches
    rows = [measure(count, options.repeats) for count in options.attempts]
    print(f"{'attempts in flight':>18}{'microseconds each':>20}{'bytes each':>14}   (CPU time and peak memory per attempt)")
    for row in rows:
        print(f"{row.num_attempts:>18}{row.microseconds:>20.1f}{row.num_bytes:>14.0f}")
    times, sizes = [row.microseconds for row in rows], [row.num_bytes for row in rows]
    for name, ratio in (("time", max(times) / min(times)), ("memory", max(sizes) / min(sizes))):
        verdict = "flat" if ratio <= MAX_GROWTH else "NOT FLAT"
        print(f"{name} per attempt: largest over smallest {ratio:.2f} ({MAX_GROWTH:.0f} allowed): {verdict}")
    verdict = "met" if max(times) <= TARGET_MICROSECONDS else "NOT MET"
    print(f"target of {TARGET_MICROSECONDS:.0f} microseconds: {verdict} ({max(times):.1f})")


if __name__ == "__main__":
    main()
