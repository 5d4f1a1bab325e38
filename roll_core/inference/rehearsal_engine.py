"""The `rehearsal` inference engine: no model, seeded random tokens, and the latency that generation would have.

A running request costs one timer of the event loop and nothing per token; its progress at an interruption follows from the
time. The engine uses only the event loop's clock, so that hours of a large run pass at once in virtual time.

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
"""Token ids are drawn below this number. It is the smallest vocabulary, so every model and renderer knows the tokens."""
_ROUNDING_S = 1e-9
"""Seconds by which a token may be early and still count as generated, since clocks add up times in a different order."""


@dataclass(frozen=True)
class GenerationPlan:
    """Token times and ending of a request that runs without interruption.

    Example: GenerationPlan(arrivals_T=[0.5, 0.6, 0.7], ending=Ending.STOP)
    """

    arrivals_T: np.ndarray
    """Seconds from the request's start in a slot to each new token."""
    ending: Ending


def plan_generation(latency: RehearsalInference, request: GenerationRequest) -> GenerationPlan:
    """Plan a request's tokens and ending. The plan depends only on the request's seed and prefix.

    A request without stop tokens always runs to its maximum length.
    """
    have, most = len(request.prefix_ids), request.max_new_tokens
    (length,) = _lognormals(derive_seed(request.seed, "length"), latency.median_tokens, latency.sigma, 1)
    natural = max(round(length), have + 1) if request.stop_token_ids else most + 1
    total = min(natural, most)
    arrivals_T = latency.seconds_to_first_token + latency.seconds_per_token * np.arange(1, total - have + 1)
    for index, seconds in _environment_waits(latency, request.seed, total):
        if index >= have:
            arrivals_T[index - have :] += seconds
    return GenerationPlan(arrivals_T, Ending.STOP if natural <= most else Ending.LENGTH)


def _environment_waits(latency: RehearsalInference, seed: int, total: int) -> list[tuple[int, float]]:
    """Waits for the environment of an attempt: (index of the token after the wait, seconds)."""
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
class _RehearsedSequence:
    """Request in the engine: first waiting for a slot, then running until its timer fires."""

    request: GenerationRequest
    plan: GenerationPlan
    done: asyncio.Future[Completion]
    started: float = 0.0
    """Event-loop time at which the request got its slot."""
    timer: asyncio.TimerHandle | None = None
    versions: list[int] = field(default_factory=list)
    """Weights versions of the tokens generated before the last weights update."""

    @property
    def num_tokens(self) -> int:
        """Number of new tokens if the request is not interrupted."""
        return len(self.plan.arrivals_T)

    def num_generated(self, now: float) -> int:
        """Number of tokens generated at event-loop time `now`; 0 while the request waits for a slot."""
        if self.timer is None:
            return 0
        return int(np.searchsorted(self.plan.arrivals_T, now - self.started + _ROUNDING_S, side="right"))

    def assign_version(self, num_tokens: int, version: int) -> None:
        """Assign `version` to all tokens among the first `num_tokens` that have no version yet."""
        self.versions += [version] * (num_tokens - len(self.versions))

    def finish(self, num_tokens: int, version: int) -> None:
        """Resolve the request with its first `num_tokens` tokens; the ending is ABORTED unless these are all."""
        if self.done.done():
            return
        self.assign_version(num_tokens, version)
        ending = self.plan.ending if num_tokens == self.num_tokens else Ending.ABORTED
        token_ids, logprob = self._draw_tokens(num_tokens)
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

    def _draw_tokens(self, count: int) -> tuple[list[int], float]:
        """Draw tokens uniformly from those that do not stop, and return them with the logprob of one such choice.

        The final stop token is planned, not drawn; it is given the same logprob.
        """
        request = self.request
        choices = np.setdiff1d(np.arange(NUM_TOKENS), request.stop_token_ids)
        indices_T = np.arange(count, dtype=np.uint64) + np.uint64(len(request.prefix_ids))
        drawn_T = uniforms(np.full(count, request.seed, dtype=np.uint64), indices_T)
        return choices[(drawn_T * len(choices)).astype(np.int64)].tolist(), -log(len(choices))


class RehearsalEngine:
    """Inference engine without a model: requests take the configured latency and return random tokens."""

    def __init__(self, latency: RehearsalInference, *, num_slots: int):
        self._latency = latency
        self._num_slots = num_slots
        self._waiting: deque[_RehearsedSequence] = deque()
        self._running: dict[_RehearsedSequence, None] = {}
        self._version = 0
        self._admitting = True

    async def generate(self, request: GenerationRequest) -> Completion:
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        sequence = _RehearsedSequence(request, plan_generation(self._latency, request), done)
        self._waiting.append(sequence)
        self._fill_slots()
        try:
            return await done
        finally:
            self._remove(sequence)  # the caller may have been cancelled

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

    async def join(self, rendezvous: "Rendezvous", rank: int) -> None:
        raise NotImplementedError("a broadcast needs engines with a model: a config that asks for this is refused")

    async def load(self, bucket: "Bucket") -> None:
        del bucket

    async def finish_update(self, version: int, check: "WeightsCheck | None") -> None:
        del check  # there is no model to compare it with
        now = asyncio.get_running_loop().time()
        for sequence in self._running:
            sequence.assign_version(sequence.num_generated(now), self._version)
        self._version = version
        self._admitting = True
        self._fill_slots()

    async def sleep(self) -> None:
        in_flight = len(self._running) + len(self._waiting)
        assert in_flight == 0, f"an engine must not sleep with {in_flight} requests in flight"
        self._admitting = False

    async def wake(self) -> None:
        pass

    async def ping(self) -> None:
        """Return at once: the engine runs in the caller's event loop."""

    def _fill_slots(self) -> None:
        while self._waiting and self._admitting and len(self._running) < self._num_slots:
            sequence = self._waiting.popleft()
            self._running[sequence] = None
            loop = asyncio.get_running_loop()
            sequence.started = loop.time()
            ends = sequence.started + float(sequence.plan.arrivals_T[-1])
            sequence.timer = loop.call_at(ends, self._complete, sequence)

    def _complete(self, sequence: _RehearsedSequence) -> None:
        sequence.finish(sequence.num_tokens, self._version)
        self._remove(sequence)

    def _interrupt(self, sequences: list[_RehearsedSequence]) -> None:
        now = asyncio.get_running_loop().time()
        for sequence in sequences:
            sequence.finish(sequence.num_generated(now), self._version)
            self._remove(sequence)

    def _remove(self, sequence: _RehearsedSequence) -> None:
        """Remove a request and free its slot, if it is still in the engine."""
        if sequence in self._running:
            del self._running[sequence]
            assert sequence.timer is not None
            sequence.timer.cancel()
            self._fill_slots()
        elif sequence.timer is None and sequence in self._waiting:
            self._waiting.remove(sequence)
