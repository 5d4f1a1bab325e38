"""What the rollout scheduler itself costs per attempt, with a thousand to a hundred thousand of them in flight.

    python benchmarks/scheduler_scale.py [--attempts 1000 10000 100000] [--repeats 3]

One collect against engines and graders that answer at once, in this process: what is left is the scheduler, its router and
its state machine, rendering and trajectories included. All attempts of the first draw are with the engines before the first
one ends; every fourth group is filtered and replaced. Prints, per attempt generated: microseconds of processor time (the
least of some repeats), and bytes at the peak (in a run of its own, since tracing memory takes time).
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
ENDING_TOGETHER = 32
"""Completions that an engine gives back at a time."""
TARGET_MICROSECONDS = 200.0
FLAT = 2.0
"""How much more an attempt may cost among many than among few."""
TOKENS = (4, 6, 8, 10, 1)
LOGPROBS, VERSIONS = (-0.5,) * len(TOKENS), (0,) * len(TOKENS)


@dataclass
class InstantEngine:
    name: str
    num_requests: int = 0

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        self.num_requests += len(requests)
        for start in range(0, len(requests), ENDING_TOGETHER):
            await asyncio.sleep(0)
            together = requests[start : start + ENDING_TOGETHER]
            yield [Completion(request.request_id, TOKENS, LOGPROBS, VERSIONS, Ending.STOP) for request in together]

    async def abort(self, request_ids: list[str]) -> None: ...


@dataclass
class InstantGrader:
    name: str

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score]:
        return [Score(float(t.attempt % 2 and t.group % 4 > 0), False) for _, t in items]


@dataclass(frozen=True)
class Seen:
    num_attempts: int
    microseconds: float
    num_bytes: float


def collect(num_attempts: int) -> tuple[float, int]:
    """Seconds of processor time, and attempts generated."""
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


def measure(num_attempts: int, repeats: int) -> Seen:
    runs = [collect(num_attempts) for _ in range(repeats)]
    gc.collect()
    tracemalloc.start()
    _, generated = collect(num_attempts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Seen(num_attempts, 1e6 * min(seconds / count for seconds, count in runs), peak / generated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    collect(1_000)  # imports and caches
    rows = [measure(count, options.repeats) for count in options.attempts]
    print(f"{'attempts in flight':>18}{'microseconds each':>20}{'bytes each':>14}")
    for row in rows:
        print(f"{row.num_attempts:>18}{row.microseconds:>20.1f}{row.num_bytes:>14.0f}")
    times, sizes = [row.microseconds for row in rows], [row.num_bytes for row in rows]
    for what, ratio in (("time", max(times) / min(times)), ("memory", max(sizes) / min(sizes))):
        print(f"{what}: within {ratio:.2f} times ({FLAT:.0f} allowed): {'flat' if ratio <= FLAT else 'NOT FLAT'}")
    verdict = "met" if max(times) <= TARGET_MICROSECONDS else "NOT MET"
    print(f"target of {TARGET_MICROSECONDS:.0f} microseconds: {verdict} ({max(times):.1f})")


if __name__ == "__main__":
    main()
