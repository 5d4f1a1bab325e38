"""Engines, graders and a trainer that only take the time they would take: what a simulated run is made of.

They speak to the rollout scheduler as real ones do, by the clock of the event loop, which `virtual_time.py` lets jump.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from roll_core.config.rollout import InFlightPolicy
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.router import Grade, GradingItem
from roll_core.simulation.workload import Demand, Workload
from roll_core.types.trajectory import Demonstration, Ending, Message, Problem, Score, Speaker

USEFUL, USELESS = 1.0, 0.0
"""Rewards of groups that pass a modelled filter and of those that do not."""
SHORTEST_S = 1e-9
"""A token takes some time, whatever a fit says."""
_ROUNDING = 1e-6
"""Tokens: sums of times are not exact, and what is this close to its end has reached it."""


@dataclass(frozen=True)
class EngineModel:
    """How fast one engine is. A token takes the same time in all sequences that run, and longer the more there are.

    Example: EngineModel(seconds_to_first_token=0.05, seconds_per_token=0.02, seconds_per_token_per_running=0.0001) gives 100
    sequences a token every 0.0299 s.
    """

    seconds_to_first_token: float
    seconds_per_token: float
    """Of a sequence that runs alone."""
    seconds_per_token_per_running: float = 0.0
    """More for each other sequence that runs."""

    def token_seconds(self, num_running: int) -> float:
        return max(SHORTEST_S, self.seconds_per_token + self.seconds_per_token_per_running * max(0, num_running - 1))


@dataclass(frozen=True)
class GraderModel:
    """Seconds that grading an attempt took, to be drawn from. Attempts of one call are graded one after another."""

    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """Seconds of a stage, by the tokens of the batch. Example: Cost(seconds=2.0, seconds_per_token=0.0001)"""

    seconds: float
    seconds_per_token: float = 0.0

    def of(self, num_tokens: int) -> float:
        return self.seconds + self.seconds_per_token * num_tokens


@dataclass(frozen=True)
class TrainerModel:
    """Seconds of an iteration outside of collect, with so many devices. `prepare` and `update` are taken to be shared evenly
    by the devices: twice as many take half the time. Nothing else depends on them."""

    num_devices: int
    prepare: Cost
    update: Cost
    """A critic's update included."""
    publish_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    """When it is due; so for a checkpoint."""
    checkpoint_seconds: float = 0.0
    other_seconds: float = 0.0
    """Commit, tracking, and what lies between stages."""


# -------------------------------------------------------------------------------------------------- an engine
class Demands:
    """What each request asks for. Shared by the engines of a simulation: an attempt that is resumed elsewhere is the same.

    Requests carry a seed; the attempts at a problem are numbered in the order in which their seeds are first seen.
    """

    def __init__(self, workload: Workload):
        self._workload = workload
        self._number_of: dict[int, dict[int, int]] = {}

    def of(self, request: GenerationRequest) -> Demand:
        problem = request.prompt_ids[0]
        numbers = self._number_of.setdefault(problem, {})
        return self._workload.demand(problem, numbers.setdefault(request.seed, len(numbers)))


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    ended: asyncio.Queue[Completion]
    num_tokens: int
    """Still to be generated."""
    delay: float
    """Between its slot and its first token."""
    began_at: float | None = None
    """By the engine's token clock; None before its first token is on its way."""
    versions: tuple[int, ...] = ()
    """Of its tokens so far, up to the last time weights changed."""
    timer: asyncio.TimerHandle | None = None

    @property
    def ends_at(self) -> float:
        assert self.began_at is not None
        return self.began_at + self.num_tokens


class SimulatedEngine:
    """Continuous batching with slots. All sequences that run are given tokens at one pace, so one clock that counts tokens
    serves them all, and the next to end is the top of a heap: whoever comes or goes costs no more with many than with few.
    """

    def __init__(self, name: str, model: EngineModel, num_slots: int, demands: Demands):
        self.name = name
        self.busy_seconds = 0.0
        self.running_seconds = 0.0
        """Summed over sequences."""
        self._model = model
        self._num_slots = num_slots
        self._demands = demands
        self._version = 0
        self._admits = True
        self._generates = True
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._by_end: list[tuple[float, int, _Sequence]] = []
        self._order = count()
        self._tokens = 0.0
        self._read_at = 0.0
        self._next_end: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # ---------------------------------------------------------------------------------------------- an EngineClient
    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        ended: asyncio.Queue[Completion] = asyncio.Queue()
        sequences = [self._sequence(request, ended) for request in requests]
        self._waiting.extend(sequences)
        self._changed()
        left = len(requests)
        try:
            while left:
                together = [await ended.get()]
                while not ended.empty():
                    together.append(ended.get_nowait())
                left -= len(together)
                yield together
        finally:
            if left:
                self._read_clock()
                for sequence in sequences:
                    self._leave(sequence)
                self._changed()

    async def abort(self, request_ids: list[str]) -> None:
        named = set(request_ids)
        waiting = [sequence for sequence in self._waiting if sequence.request.request_id in named]
        self._interrupt(waiting + [self._running[name] for name in request_ids if name in self._running])

    # ---------------------------------------------------------------------------------------------- new weights
    async def adopt(self, version: int, in_flight: InFlightPolicy, seconds: float) -> None:
        """Take over weights, which takes `seconds` in which nothing is generated."""
        self._admits = False
        match in_flight:
            case InFlightPolicy.FINISH:
                await self._idle.wait()
            case InFlightPolicy.RESUME:
                self._interrupt(list(self._running.values()))
            case InFlightPolicy.CONTINUE:
                pass
        self._read_clock()
        self._generates = False
        self._changed()
        await asyncio.sleep(seconds)
        self._read_clock()
        for sequence in self._running.values():
            sequence.versions = self._versions(sequence, self._num_there(sequence))
        self._version = version
        self._admits = self._generates = True
        self._changed()

    # ---------------------------------------------------------------------------------------------- sequences
    def _sequence(self, request: GenerationRequest, ended: asyncio.Queue[Completion]) -> _Sequence:
        demand = self._demands.of(request)
        total = min(demand.num_tokens, request.max_new_tokens)
        num_tokens = max(1, total - len(request.prefix_ids))
        delay = self._model.seconds_to_first_token + demand.waiting_seconds * num_tokens / total
        return _Sequence(request, ended, num_tokens, delay)

    def _admit(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._admits and len(self._running) < self._num_slots:
            sequence = self._waiting.popleft()
            self._running[sequence.request.request_id] = sequence
            if sequence.delay:
                sequence.timer = loop.call_later(sequence.delay, self._begin, sequence)
            else:
                self._push(sequence)
        if self._running:
            self._idle.clear()

    def _begin(self, sequence: _Sequence) -> None:
        self._read_clock()
        self._push(sequence)
        self._changed()

    def _push(self, sequence: _Sequence) -> None:
        sequence.began_at = self._tokens
        heapq.heappush(self._by_end, (sequence.ends_at, next(self._order), sequence))

    def _end_those_due(self) -> None:
        self._read_clock()
        while self._by_end and self._by_end[0][0] <= self._tokens + _ROUNDING:
            sequence = heapq.heappop(self._by_end)[2]
            if self._leave(sequence):
                self._answer(sequence, sequence.num_tokens, Ending.STOP)
        self._changed()

    def _interrupt(self, sequences: list[_Sequence]) -> None:
        self._read_clock()
        for sequence in sequences:
            num_there = self._num_there(sequence)
            if self._leave(sequence):
                self._answer(sequence, num_there, Ending.ABORTED)
        self._changed()

    def _leave(self, sequence: _Sequence) -> bool:
        """Give its place to others; False if it was gone."""
        if sequence.timer is not None:
            sequence.timer.cancel()
        if self._running.get(sequence.request.request_id) is sequence:
            del self._running[sequence.request.request_id]
            if not self._running:
                self._idle.set()
            return True
        if sequence.began_at is None and sequence in self._waiting:
            self._waiting.remove(sequence)
            return True
        return False

    def _num_there(self, sequence: _Sequence) -> int:
        """Tokens it has; the last one is only there when it ends."""
        if sequence.began_at is None:
            return 0
        return min(int(self._tokens - sequence.began_at + _ROUNDING), sequence.num_tokens - 1)

    def _versions(self, sequence: _Sequence, num_tokens: int) -> tuple[int, ...]:
        known = sequence.versions[:num_tokens]
        return known + repeated(self._version, num_tokens - len(known))

    def _answer(self, sequence: _Sequence, num_tokens: int, ending: Ending) -> None:
        blank = repeated(0, num_tokens)
        versions = self._versions(sequence, num_tokens)
        sequence.ended.put_nowait(Completion(sequence.request.request_id, blank, blank, versions, ending))

    # ---------------------------------------------------------------------------------------------- the token clock
    def _read_clock(self) -> None:
        """Bring everything that grows with time up to now."""
        now = asyncio.get_running_loop().time()
        passed, self._read_at = now - self._read_at, now
        running = len(self._running)
        self.busy_seconds += passed * (running > 0)
        self.running_seconds += passed * running
        if self._generates and running:
            self._tokens += passed / self._model.token_seconds(running)

    def _changed(self) -> None:
        """Somebody came or went: fill free slots, and wait for the next end at the new pace."""
        self._read_clock()
        self._admit()
        if self._next_end is not None:
            self._next_end.cancel()
            self._next_end = None
        while self._by_end and self._by_end[0][2] is not self._running.get(self._by_end[0][2].request.request_id):
            heapq.heappop(self._by_end)
        if self._by_end and self._generates:
            tokens_left = max(0.0, self._by_end[0][0] - self._tokens)
            seconds = tokens_left * self._model.token_seconds(len(self._running))
            self._next_end = asyncio.get_running_loop().call_later(seconds, self._end_those_due)


@lru_cache(maxsize=4096)
def repeated(value: int, count: int) -> tuple[int, ...]:
    """Shared between completions: thousands of long ones are alike."""
    return (value,) * count


# -------------------------------------------------------------------------------------------------- graders and problems
@dataclass(frozen=True)
class SimulatedGrader:
    name: str
    model: GraderModel
    workload: Workload
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    async def grade(self, items: list[GradingItem]) -> list[Grade]:
        await asyncio.sleep(sum(self.chance.choice(self.model.seconds) for _ in items))
        useful = (self.workload.is_useful(int(problem.answer)) for problem, _ in items)
        return [Score(USEFUL if passes else USELESS, passes) for passes in useful]


class NumberedProblems:
    """Problems that are their place in the stream."""

    domains = frozenset({"modelled"})

    def problem(self, index: int) -> Problem:
        return Problem(f"modelled/{index}", "modelled", (Message(Speaker.USER, str(index)),), str(index))

    def held_out(self, count: int) -> list[Problem]:
        return [self.problem(index) for index in range(count)]

    def demonstration(self, index: int) -> Demonstration:
        return Demonstration(self.problem(index), "")


class NumberRenderer:
    """A prompt of one token: the number of the problem, which `Demands` reads."""

    stop_token_ids: tuple[int, ...] = (1,)

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return (int(messages[0].text),)

    def completion(self, text: str) -> tuple[int, ...]:
        return repeated(0, len(text))

    def text(self, token_ids: tuple[int, ...]) -> str:  # noqa: ARG002
        return ""
