"""What attempts ask of engines: how many tokens, for which problem. As a run recorded it, or as distributions say.

A demand depends on the problem and the number of the attempt alone, so that simulations of different settings face the same.
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
    """Example: Demand(num_tokens=812)"""

    num_tokens: int
    waiting_seconds: float = 0.0
    """With an engine and not generating: the environment of an agent."""


class Workload(Protocol):
    def demand(self, problem: int, number: int) -> Demand:
        """Of an attempt at a problem, numbered from 0."""
        ...

    def is_useful(self, problem: int) -> bool:
        """Whether the problem's group would pass rollout.filter."""
        ...


@dataclass(frozen=True)
class SampledWorkload:
    """Lognormal lengths. Example: SampledWorkload(median_tokens=400, sigma=0.9, most_tokens=6144)"""

    median_tokens: float
    sigma: float
    """Standard deviation of the logarithm of lengths; 0 makes all the same."""
    most_tokens: int
    useful_share: float = 1.0
    num_waits: int = 0
    """Times an attempt waits for its environment, each for a time that is lognormal as well."""
    median_wait_seconds: float = 0.0
    wait_sigma: float = 0.0
    seed: int = 0

    def demand(self, problem: int, number: int) -> Demand:
        chance = random.Random(f"{self.seed}/{problem}/{number}")
        tokens = round(_lognormal(chance, self.median_tokens, self.sigma))
        waits = (_lognormal(chance, self.median_wait_seconds, self.wait_sigma) for _ in range(self.num_waits))
        return Demand(max(1, min(self.most_tokens, tokens)), math.fsum(waits))

    def is_useful(self, problem: int) -> bool:
        return random.Random(f"{self.seed}/{problem}").random() < self.useful_share


def _lognormal(chance: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * chance.gauss(0.0, 1.0))


@dataclass(frozen=True)
class RecordedGroup:
    """Example: RecordedGroup(lengths=(96, 112, 640, 88), useful=True)"""

    lengths: tuple[int, ...]
    useful: bool


@dataclass(frozen=True)
class RecordedWorkload:
    """Groups of a run in their order; beyond those, groups of it at random, each as it was: long attempts come together, and
    none loses its longest."""

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
    """What a run's attempts were like. An aborted one would have become longer than it is: it gets the length of one that
    did become longer. Without that, a run with redundancy, which aborts the long ones, would look quicker than it is."""
    begun = [trace for trace in traces if trace.num_tokens]
    ended = [trace for trace in begun if trace.fate is not Fate.ABORTED or trace.grading_at is not None]
    cut_short = [trace for trace in begun if trace.fate is Fate.ABORTED and trace.grading_at is None]
    lengths = sorted(trace.num_tokens for trace in ended)
    lengths_of: dict[int, list[int]] = {}
    for trace in ended:
        lengths_of.setdefault(trace.problem, []).append(trace.num_tokens)
    chance = random.Random(seed)
    for trace in sorted(cut_short, key=lambda trace: trace.num_tokens, reverse=True):
        longer = lengths[bisect.bisect(lengths, trace.num_tokens) :]
        length = chance.choice(longer or [trace.num_tokens])
        bisect.insort(lengths, length)
        lengths_of.setdefault(trace.problem, []).append(length)
    useless = {trace.problem for trace in begun if trace.fate is Fate.FILTERED}
    groups = (RecordedGroup(tuple(of_group), problem not in useless) for problem, of_group in sorted(lengths_of.items()))
    return RecordedWorkload(tuple(groups), seed)
