"""The `rehearsal` inference engine: no model, the time that generation would take, and seeded random tokens.

A running request costs one timer of the event loop and nothing per token; how far it is when it is interrupted follows from
the time. Only the loop's clock is used, so that hours of a large run pass at once where the loop has virtual time.
Shapes: T new tokens of one request.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from math import exp, log
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from roll_core.config.inference import RehearsalInference
from roll_core.config.rollout import InFlightPolicy
from roll_core.inference.randomness import uniforms
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.models.characters import VOCABULARY
from roll_core.seeds import derive_seed
from roll_core.types.trajectory import Ending

if TYPE_CHECKING:
    from roll_core.weights.broadcast import Rendezvous
    from roll_core.weights.buckets import Bucket
    from roll_core.weights.checks import WeightsCheck

NUM_TOKENS = len(VOCABULARY)
"""Ids below this are drawn: the smallest vocabulary there is, so that every model and renderer knows them."""
_ROUNDING_S = 1e-9
"""Clocks add times up in another order: a token that is so close is there."""


@dataclass(frozen=True)
class GenerationPlan:
    """What becomes of a request that nobody interrupts.

    Example: GenerationPlan(arrivals_T=[0.5, 0.6, 0.7], ending=Ending.STOP)
    """

    arrivals_T: np.ndarray
    """When each new token is there, in seconds after the request got its slot."""
    ending: Ending


def plan_generation(latency: RehearsalInference, request: GenerationRequest) -> GenerationPlan:
    """It depends on the request's seed and prefix alone. Without stop tokens a completion cannot end by itself."""
    have, most = len(request.prefix_ids), request.max_new_tokens
    (length,) = _lognormals(derive_seed(request.seed, "length"), latency.median_tokens, latency.sigma, 1)
    natural = max(round(length), have + 1) if request.stop_token_ids else most + 1
    total = min(natural, most)
    arrivals_T = latency.seconds_to_first_token + latency.seconds_per_token * np.arange(1, total - have + 1)
    for place, seconds in _waits(latency, request.seed, total):
        if place >= have:
            arrivals_T[place - have :] += seconds
    return GenerationPlan(arrivals_T, Ending.STOP if natural <= most else Ending.LENGTH)


def _waits(latency: RehearsalInference, seed: int, total: int) -> list[tuple[int, float]]:
    """Seconds an attempt waits for its environment, and the place of the token that comes next."""
    environment = latency.environment
    if environment is None:
        return []
    turns = environment.turns
    seconds = _lognormals(derive_seed(seed, "environment"), environment.median_seconds, environment.sigma, turns)
    return [((turn + 1) * total // (turns + 1), seconds[turn]) for turn in range(turns)]


def _lognormals(seed: int, median: float, sigma: float, count: int) -> list[float]:
    drawn = uniforms(np.full(count, seed, dtype=np.uint64), np.arange(count, dtype=np.uint64))
    return [median * exp(sigma * NormalDist().inv_cdf(uniform or 2.0**-54)) for uniform in drawn.tolist()]


@dataclass(eq=False)
class _Sequence:
    """A request on its way: waiting until it has a slot, then done when its timer goes off."""

    request: GenerationRequest
    course: GenerationPlan
    done: asyncio.Future[Completion]
    started: float = 0.0
    timer: asyncio.TimerHandle | None = None
    versions: list[int] = field(default_factory=list)
    """Of the tokens that were there when weights changed."""

    @property
    def num_tokens(self) -> int:
        """All it will have, if nobody interrupts it."""
        return len(self.course.arrivals_T)

    def num_there(self, now: float) -> int:
        if self.timer is None:
            return 0
        return int(np.searchsorted(self.course.arrivals_T, now - self.started + _ROUNDING_S, side="right"))

    def credit(self, num_tokens: int, version: int) -> None:
        """Tokens up to here that nobody has claimed yet are this version's."""
        self.versions += [version] * (num_tokens - len(self.versions))

    def finish(self, num_tokens: int, version: int) -> None:
        """Done, with so many tokens: aborted, unless these are all."""
        if self.done.done():
            return
        self.credit(num_tokens, version)
        ending = self.course.ending if num_tokens == self.num_tokens else Ending.ABORTED
        token_ids, logprob = self._draw(num_tokens)
        if ending is Ending.STOP:
            token_ids[-1] = self.request.stop_token_ids[0]
        self.done.set_result(
            Completion(
                request_id=self.request.request_id,
                token_ids=tuple(token_ids),
                sampler_logprobs=(logprob,) * num_tokens,
                weights_versions=tuple(self.versions),
                ending=ending,
            )
        )

    def _draw(self, count: int) -> tuple[list[int], float]:
        """Tokens chosen uniformly among those that do not stop, and the logprob of such a choice; a stop token, which is not
        chosen but due, is given the same."""
        request = self.request
        choices = np.setdiff1d(np.arange(NUM_TOKENS), request.stop_token_ids)
        places_T = np.arange(count, dtype=np.uint64) + np.uint64(len(request.prefix_ids))
        drawn_T = uniforms(np.full(count, request.seed, dtype=np.uint64), places_T)
        return choices[(drawn_T * len(choices)).astype(np.int64)].tolist(), -log(len(choices))


class RehearsalEngine:
    def __init__(self, latency: RehearsalInference, *, num_slots: int):
        self._latency = latency
        self._num_slots = num_slots
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[_Sequence, None] = {}
        self._version = 0
        self._admitting = True

    async def generate(self, request: GenerationRequest) -> Completion:
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        sequence = _Sequence(request, plan_generation(self._latency, request), done)
        self._waiting.append(sequence)
        self._fill_slots()
        try:
            return await done
        finally:
            self._leave(sequence)  # whoever asked may have gone before it was done

    async def abort(self, *request_ids: str) -> None:
        self._interrupt([s for s in [*self._waiting, *self._running] if s.request.request_id in request_ids])

    async def begin_update(self, in_flight: InFlightPolicy) -> None:
        self._admitting = False
        match in_flight:
            case InFlightPolicy.FINISH:
                await asyncio.gather(*(s.done for s in self._running), return_exceptions=True)
            case InFlightPolicy.RESUME:
                self._interrupt(list(self._running))
            case InFlightPolicy.CONTINUE:
                pass

    async def join(self, meeting: "Rendezvous", rank: int) -> None:
        raise NotImplementedError("a broadcast needs engines with a model: a config that asks for this is refused")

    async def load(self, bucket: "Bucket") -> None:
        del bucket

    async def finish_update(self, version: int, check: "WeightsCheck | None") -> None:
        del check  # there is no model to compare it with
        now = asyncio.get_running_loop().time()
        for sequence in self._running:
            sequence.credit(sequence.num_there(now), self._version)
        self._version = version
        self._admitting = True
        self._fill_slots()

    async def sleep(self) -> None:
        in_flight = len(self._running) + len(self._waiting)
        assert in_flight == 0, f"an engine must not sleep with {in_flight} requests in flight"
        self._admitting = False

    async def wake(self) -> None:
        pass

    async def answer(self) -> None:
        """It lives in the event loop of who asks."""

    def _fill_slots(self) -> None:
        while self._waiting and self._admitting and len(self._running) < self._num_slots:
            sequence = self._waiting.popleft()
            self._running[sequence] = None
            loop = asyncio.get_running_loop()
            sequence.started = loop.time()
            ends = sequence.started + float(sequence.course.arrivals_T[-1])
            sequence.timer = loop.call_at(ends, self._complete, sequence)

    def _complete(self, sequence: _Sequence) -> None:
        sequence.finish(sequence.num_tokens, self._version)
        self._leave(sequence)

    def _interrupt(self, sequences: list[_Sequence]) -> None:
        now = asyncio.get_running_loop().time()
        for sequence in sequences:
            sequence.finish(sequence.num_there(now), self._version)
            self._leave(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        """Make room, if it has not left already."""
        if sequence in self._running:
            del self._running[sequence]
            assert sequence.timer is not None
            sequence.timer.cancel()
            self._fill_slots()
        elif sequence.timer is None and sequence in self._waiting:
            self._waiting.remove(sequence)
