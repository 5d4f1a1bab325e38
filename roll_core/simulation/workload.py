"""Workloads of a simulation: how many tokens each attempt needs, recorded from a run or sampled from distributions.

A demand depends only on the problem and the number of the attempt, so that simulations of different settings face the same
workload.
"""

import bisect
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from roll_core.types.trace import AttemptTrace, Fate


@dataclass(frozen=True)
class Demand:
    """Work that one attempt asks of an engine.

    Example: Demand(num_tokens=812)
    """

    num_tokens: int
    """Length of the completion in tokens."""
    waiting_seconds: float = 0.0
    """Seconds in a slot without generating: an agent's environment."""


class Workload(Protocol):
    """Demand of every attempt and usefulness of every group."""

    def demand(self, problem: int, number: int) -> Demand:
        """Return the demand of an attempt at a problem; attempts are numbered from 0."""
        ...

    def is_useful(self, problem: int) -> bool:
        """True if the problem's group would pass `rollout.filter`."""
        ...


@dataclass(frozen=True)
class SampledWorkload:
    """Workload with lognormal completion lengths.

    Example: SampledWorkload(median_tokens=400, sigma=0.9, max_tokens=6144)
    """

    median_tokens: float
    sigma: float
    """Standard deviation of the logarithm of lengths; 0 makes all lengths equal."""
    max_tokens: int
    """Limit of completion lengths."""
    useful_share: float = 1.0
    """Share of groups that pass `rollout.filter`."""
    num_waits: int = 0
    """Number of waits of an attempt for its environment; each wait is lognormal."""
    median_wait_seconds: float = 0.0
    wait_sigma: float = 0.0
    """Standard deviation of the logarithm of waits."""
    seed: int = 0

    def demand(self, problem: int, number: int) -> Demand:
        rng = random.Random(f"{self.seed}/{problem}/{number}")
        tokens = round(_lognormal(rng, self.median_tokens, self.sigma))
        waits = (_lognormal(rng, self.median_wait_seconds, self.wait_sigma) for _ in range(self.num_waits))
        return Demand(max(1, min(self.max_tokens, tokens)), math.fsum(waits))

    def is_useful(self, problem: int) -> bool:
        return random.Random(f"{self.seed}/{problem}").random() < self.useful_share


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * rng.gauss(0.0, 1.0))


@dataclass(frozen=True)
class RecordedGroup:
    """Completion lengths of one recorded group in tokens, and whether the group was trained on or filtered out.

    Example: RecordedGroup(lengths=(96, 112, 640, 88), useful=True)
    """

    lengths: tuple[int, ...]
    """Length of each attempt in tokens."""
    useful: bool
    """False if the group was filtered out."""


@dataclass(frozen=True)
class RecordedWorkload:
    """Workload of a recorded run: its groups in order, then whole groups drawn from it at random. Drawing whole groups
    preserves how lengths cluster within a group, and the longest attempt of each."""

    groups: tuple[RecordedGroup, ...]
    seed: int = 0

    def demand(self, problem: int, number: int) -> Demand:
        lengths = self._group(problem).lengths
        return Demand(lengths[number % len(lengths)])

    def is_useful(self, problem: int) -> bool:
        return self._group(problem).useful

    def _group(self, problem: int) -> RecordedGroup:
        if problem < len(self.groups):
            return self.groups[problem]
        return random.Random(f"{self.seed}/{problem}").choice(self.groups)


def recorded_workload(traces: Iterable[AttemptTrace], seed: int = 0) -> RecordedWorkload:
    """Build the workload of a recorded run.

    An aborted attempt would have become longer than it is, so it gets the length of a random longer attempt. Otherwise a run
    with redundancy, which aborts the long attempts, would look faster than it is.
    """
    begun = [trace for trace in traces if trace.num_tokens]
    ended = [trace for trace in begun if trace.fate is not Fate.ABORTED or trace.grading_at is not None]
    cut_short = [trace for trace in begun if trace.fate is Fate.ABORTED and trace.grading_at is None]
    lengths = sorted(trace.num_tokens for trace in ended)
    lengths_of: dict[int, list[int]] = {}
    for trace in ended:
        lengths_of.setdefault(trace.problem, []).append(trace.num_tokens)
    rng = random.Random(seed)
    for trace in sorted(cut_short, key=lambda trace: trace.num_tokens, reverse=True):
        longer = lengths[bisect.bisect(lengths, trace.num_tokens) :]
        length = rng.choice(longer or [trace.num_tokens])
        bisect.insort(lengths, length)
        lengths_of.setdefault(trace.problem, []).append(length)
    useless = {trace.problem for trace in begun if trace.fate is Fate.FILTERED}
    groups = (RecordedGroup(tuple(of_group), problem not in useless) for problem, of_group in sorted(lengths_of.items()))
    return RecordedWorkload(tuple(groups), seed)
