"""Modelled engines, graders and trainer that only take time. `simulator.py` runs the real rollout scheduler with them.

They implement the clients of `rollout/router.py`. They sleep by the event loop's clock, which `virtual_time.py` makes jump.
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
"""Rewards of groups that pass the modelled filter, and of groups that do not."""
MIN_TOKEN_S = 1e-9
"""Minimum seconds per token, whatever a fit says."""
_ROUNDING = 1e-6
"""Tolerance in tokens: sums of floating-point times are inexact."""


@dataclass(frozen=True)
class EngineModel:
    """Speed of one engine. A decode step takes the same time for all running sequences, and longer the more there are.

    Example: EngineModel(seconds_to_first_token=0.05, seconds_per_token=0.02, seconds_per_token_per_running=0.0001) gives 100
    sequences a token every 0.0299 s.
    """

    seconds_to_first_token: float
    """Seconds between getting a slot and the start of decoding (prefill)."""
    seconds_per_token: float
    """Seconds per token of a sequence that runs alone."""
    seconds_per_token_per_running: float = 0.0
    """Additional seconds per token for each other running sequence."""

    def token_seconds(self, num_running: int) -> float:
        """Seconds per token while `num_running` sequences run."""
        return max(MIN_TOKEN_S, self.seconds_per_token + self.seconds_per_token_per_running * max(0, num_running - 1))


@dataclass(frozen=True)
class GraderModel:
    """Sample of grading seconds per attempt, to be drawn from. Attempts of one call are graded one after another."""

    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """Seconds of a stage as a line over the tokens of the batch.

    Example: Cost(seconds=2.0, seconds_per_token=0.0001)
    """

    seconds: float
    seconds_per_token: float = 0.0

    def seconds_for(self, num_tokens: int) -> float:
        """Seconds for a batch of `num_tokens` tokens."""
        return self.seconds + self.seconds_per_token * num_tokens


@dataclass(frozen=True)
class TrainerModel:
    """Seconds of the stages of an iteration other than collect, measured with `num_devices` devices.

    `prepare` and `update` are assumed to scale linearly: twice the devices take half the time. The other stages do not
    depend on the number of devices.
    """

    num_devices: int
    prepare: Cost
    update: Cost
    """Seconds of the update, a critic's included."""
    publish_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    """Seconds of one evaluation, in iterations that have one."""
    checkpoint_seconds: float = 0.0
    """Seconds of one checkpoint, in iterations that have one."""
    other_seconds: float = 0.0
    """Seconds of commit, tracking and the gaps between stages."""


# -------------------------------------------------------------------------------------------------- engine
class DemandBook:
    """Lookup of the demand of each request, shared by all engines: an attempt that is resumed elsewhere keeps its demand.

    Attempts at a problem are numbered in the order in which their request seeds are first seen.
    """

    def __init__(self, workload: Workload):
        self._workload = workload
        self._number_of: dict[int, dict[int, int]] = {}

    def demand_for(self, request: GenerationRequest) -> Demand:
        """Return the demand of a request; its first prompt token is the problem number."""
        problem = request.prompt_ids[0]
        numbers = self._number_of.setdefault(problem, {})
        return self._workload.demand(problem, numbers.setdefault(request.seed, len(numbers)))


@dataclass(eq=False)
class _SimulatedSequence:
    """Request at a simulated engine."""

    request: GenerationRequest
    ended: asyncio.Queue[Completion]
    """Queue that gets the completion."""
    num_tokens: int
    """Tokens to generate in this visit."""
    delay: float
    """Seconds between getting a slot and decoding."""
    began_at: float | None = None
    """Value of the token clock when decoding began; None before that."""
    versions: tuple[int, ...] = ()
    """Weights version of each token generated up to the last change of weights."""
    timer: asyncio.TimerHandle | None = None
    """Timer of `delay`."""

    @property
    def ends_at(self) -> float:
        """Value of the token clock at which the sequence is complete."""
        assert self.began_at is not None
        return self.began_at + self.num_tokens


class SimulatedEngine:
    """Simulated engine with continuous batching in a fixed number of slots.

    All running sequences get tokens at the same rate. One clock that counts tokens therefore serves all of them, and the
    next sequence to end is at the top of a heap: the cost of a change hardly grows with the number of running sequences.
    """

    def __init__(self, name: str, model: EngineModel, num_slots: int, demands: DemandBook):
        self.name = name
        self.busy_seconds = 0.0
        """Seconds with at least one running sequence."""
        self.running_seconds = 0.0
        """Seconds in slots, summed over sequences."""
        self._model = model
        self._num_slots = num_slots
        self._demands = demands
        self._version = 0
        self._admits = True
        """False while weights are adopted: waiting requests get no slot."""
        self._generates = True
        """False while the token clock stands still."""
        self._waiting: deque[_SimulatedSequence] = deque()
        self._running: dict[str, _SimulatedSequence] = {}
        self._by_end: list[tuple[float, int, _SimulatedSequence]] = []
        """Heap of decoding sequences by end on the token clock; sequences that left are dropped lazily."""
        self._order = count()
        self._tokens = 0.0
        """Token clock: tokens that a sequence would have got since the start."""
        self._read_at = 0.0
        """Event-loop time up to which the token clock is advanced."""
        self._next_end: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # ---------------------------------------------------------------------------------------------- EngineClient
    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        """Yield completions in the order they finish, several at a time."""
        ended: asyncio.Queue[Completion] = asyncio.Queue()
        sequences = [self._sequence(request, ended) for request in requests]
        self._waiting.extend(sequences)
        self._reschedule()
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
                self._advance_clock()
                for sequence in sequences:
                    self._leave(sequence)
                self._reschedule()

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests now with the tokens so far."""
        named = set(request_ids)
        waiting = [sequence for sequence in self._waiting if sequence.request.request_id in named]
        self._interrupt(waiting + [self._running[name] for name in request_ids if name in self._running])

    # ---------------------------------------------------------------------------------------------- new weights
    async def adopt(self, version: int, in_flight: InFlightPolicy, seconds: float) -> None:
        """Adopt a weights version under an in-flight policy; for `seconds` nothing is generated."""
        self._admits = False
        match in_flight:
            case InFlightPolicy.FINISH:
                await self._idle.wait()
            case InFlightPolicy.RESUME:
                self._interrupt(list(self._running.values()))
            case InFlightPolicy.CONTINUE:
                pass
        self._advance_clock()
        self._generates = False
        self._reschedule()
        await asyncio.sleep(seconds)
        self._advance_clock()
        for sequence in self._running.values():
            sequence.versions = self._versions(sequence, self._num_generated(sequence))
        self._version = version
        self._admits = self._generates = True
        self._reschedule()

    # ---------------------------------------------------------------------------------------------- sequences
    def _sequence(self, request: GenerationRequest, ended: asyncio.Queue[Completion]) -> _SimulatedSequence:
        demand = self._demands.demand_for(request)
        total = min(demand.num_tokens, request.max_new_tokens)
        num_tokens = max(1, total - len(request.prefix_ids))
        delay = self._model.seconds_to_first_token + demand.waiting_seconds * num_tokens / total
        return _SimulatedSequence(request, ended, num_tokens, delay)

    def _admit(self) -> None:
        """Give free slots to waiting requests."""
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

    def _begin(self, sequence: _SimulatedSequence) -> None:
        """Begin to decode a sequence whose delay is over."""
        self._advance_clock()
        self._push(sequence)
        self._reschedule()

    def _push(self, sequence: _SimulatedSequence) -> None:
        sequence.began_at = self._tokens
        heapq.heappush(self._by_end, (sequence.ends_at, next(self._order), sequence))

    def _finish_due(self) -> None:
        """Complete every sequence whose end has been reached."""
        self._advance_clock()
        while self._by_end and self._by_end[0][0] <= self._tokens + _ROUNDING:
            sequence = heapq.heappop(self._by_end)[2]
            if self._leave(sequence):
                self._emit_completion(sequence, sequence.num_tokens, Ending.STOP)
        self._reschedule()

    def _interrupt(self, sequences: list[_SimulatedSequence]) -> None:
        """Return these sequences as aborted, with the tokens so far."""
        self._advance_clock()
        for sequence in sequences:
            num_generated = self._num_generated(sequence)
            if self._leave(sequence):
                self._emit_completion(sequence, num_generated, Ending.ABORTED)
        self._reschedule()

    def _leave(self, sequence: _SimulatedSequence) -> bool:
        """Remove a sequence from its slot or the waiting queue; False if it had left before."""
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

    def _num_generated(self, sequence: _SimulatedSequence) -> int:
        """Tokens generated so far in this visit; the last token counts only at the end."""
        if sequence.began_at is None:
            return 0
        return min(int(self._tokens - sequence.began_at + _ROUNDING), sequence.num_tokens - 1)

    def _versions(self, sequence: _SimulatedSequence, num_tokens: int) -> tuple[int, ...]:
        """Weights version of each of the first `num_tokens` tokens."""
        known = sequence.versions[:num_tokens]
        return known + repeated(self._version, num_tokens - len(known))

    def _emit_completion(self, sequence: _SimulatedSequence, num_tokens: int, ending: Ending) -> None:
        blank = repeated(0, num_tokens)
        versions = self._versions(sequence, num_tokens)
        sequence.ended.put_nowait(Completion(sequence.request.request_id, blank, blank, versions, ending))

    # ---------------------------------------------------------------------------------------------- the token clock
    def _advance_clock(self) -> None:
        """Advance the token clock and the busy counters to the current time."""
        now = asyncio.get_running_loop().time()
        passed, self._read_at = now - self._read_at, now
        running = len(self._running)
        self.busy_seconds += passed * (running > 0)
        self.running_seconds += passed * running
        if self._generates and running:
            self._tokens += passed / self._model.token_seconds(running)

    def _reschedule(self) -> None:
        """Fill free slots and set the timer for the next end at the current rate; called after every change."""
        self._advance_clock()
        self._admit()
        if self._next_end is not None:
            self._next_end.cancel()
            self._next_end = None
        while self._by_end and self._by_end[0][2] is not self._running.get(self._by_end[0][2].request.request_id):
            heapq.heappop(self._by_end)
        if self._by_end and self._generates:
            tokens_left = max(0.0, self._by_end[0][0] - self._tokens)
            seconds = tokens_left * self._model.token_seconds(len(self._running))
            self._next_end = asyncio.get_running_loop().call_later(seconds, self._finish_due)


@lru_cache(maxsize=4096)
def repeated(value: int, count: int) -> tuple[int, ...]:
    """Tuple of `count` times `value`, cached: thousands of long completions are alike."""
    return (value,) * count


# -------------------------------------------------------------------------------------------------- graders and problems
@dataclass(frozen=True)
class SimulatedGrader:
    """Simulated grader: sleeps for sampled grading times and returns the rewards of the modelled filter."""

    name: str
    model: GraderModel
    workload: Workload
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]:
        await asyncio.sleep(sum(self.rng.choice(self.model.seconds) for _ in items))
        useful = (self.workload.is_useful(int(problem.answer)) for problem, _ in items)
        yield [(index, Score(USEFUL if passes else USELESS, passes)) for index, passes in enumerate(useful)]


class NumberedProblems:
    """Problem source whose problems are their own position in the stream."""

    domains = frozenset({"modelled"})

    def problem(self, index: int) -> Problem:
        return Problem(f"modelled/{index}", "modelled", (Message(Speaker.USER, str(index)),), str(index))

    def held_out(self, count: int) -> list[Problem]:
        return [self.problem(index) for index in range(count)]

    def demonstration(self, index: int) -> Demonstration:
        return Demonstration(self.problem(index), "")


class NumberRenderer:
    """Renderer to prompts of one token, the problem number, which `DemandBook` reads."""

    stop_token_ids: tuple[int, ...] = (1,)

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return (int(messages[0].text),)

    def completion(self, text: str) -> tuple[int, ...]:
        return repeated(0, len(text))

    def text(self, token_ids: tuple[int, ...]) -> str:  # noqa: ARG002
        return ""
