"""Many engines as one, and many graders: who gets what, and who is still there. For the length of one stage.

An attempt goes to the engine that has least to do, or to the one that has others of its group (and their prompt), unless
that one is well behind. What becomes ready together travels in one call per engine, since a call costs more than a token.
Whoever dies is left out from then on, and what it had is given to others: tokens depend on seed and weights alone, so
nothing changes by that. What happened is told to whoever drives the stage, as the events below.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from roll_core.config.rollout import RolloutConfig
from roll_core.errors import RewardUnavailable, RoleDied
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.types.trajectory import Ending, Failure, Problem, Score, Trajectory

GRADED_AT_ONCE = 256
"""Most trajectories sent to a grader in one call; those that end together are shared out over all graders first."""
BITES_PER_ENGINE = 4
"""An engine holds as many requests as it has slots and a quarter more, which wait there, so that a free slot is filled
without a message; and it gets that quarter at once, so that calls stay few."""
SMOOTHING = 0.01
"""Of the mean length of completions: it forgets those of about a hundred before."""

GradingItem = tuple[Problem, Trajectory]
Grade = Score | Failure | RewardUnavailable


class EngineClient(Protocol):
    @property
    def name(self) -> str: ...

    def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        """Completions in the order they finish, several at a time."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """End these now; they come back from `generate` with what they have. What is unknown or over is ignored."""
        ...


class GraderClient(Protocol):
    @property
    def name(self) -> str: ...

    async def grade(self, items: list[GradingItem]) -> list[Grade]:
        """One answer per item, in order. What stays unavailable is answered, not raised: its siblings keep their grades."""
        ...


@dataclass(frozen=True)
class Completed:
    """Attempts an engine is done with."""

    completions: list[Completion]


@dataclass(frozen=True)
class GenerationFailed:
    """A call to an engine failed, and with it these. After a RoleDied another engine can have them."""

    request_ids: list[str]
    error: BaseException


@dataclass(frozen=True)
class Graded:
    """What a grader said of each item."""

    answers: list[tuple[GradingItem, Grade]]


@dataclass(frozen=True)
class GradingFailed:
    """A call to a grader failed. After a RoleDied another one can have its items."""

    items: list[GradingItem]
    error: BaseException


RolloutEvent = Completed | GenerationFailed | Graded | GradingFailed
Tell = Callable[[RolloutEvent], None]


@dataclass
class DeadRoles:
    """Who is no more, with the sentence it died by. Outlives a stage: the dead stay dead until they have successors."""

    sentences: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, error: RoleDied) -> None:
        self.sentences[name] = str(error)

    def of(self, clients: Sequence[EngineClient] | Sequence[GraderClient]) -> RoleDied:
        """The failure of a stage that has nobody left."""
        sentences = [self.sentences[client.name] for client in clients if client.name in self.sentences]
        return RoleDied("; ".join(sentences) + ("; none is left" if len(sentences) > 1 else ""))


class _Calls:
    """Calls under way. A call that fails is reported to whoever made it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, call: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failed(error)

        task.add_done_callback(ended)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


@dataclass(frozen=True)
class _AtEngine:
    """Where a request is."""

    name: str
    num_tokens: int


class Router:
    """An engine has room for as many requests as it has slots, and a quarter more, which wait there; and, where
    `rollout.tokens_per_engine` says how much its cache holds, for as many as are expected to fit."""

    def __init__(self, engines: Sequence[EngineClient], config: RolloutConfig, deaths: DeadRoles, tell: Tell):
        self._engines = {engine.name: engine for engine in engines}
        self._deaths = deaths
        self._tell = tell
        self._slots = config.slots_per_engine
        self._bite = -(-config.slots_per_engine // BITES_PER_ENGINE)
        self._cache_tokens = config.tokens_per_engine
        self._alive = {engine.name: engine for engine in engines if engine.name not in deaths.sentences}
        self.load = dict.fromkeys(self._alive, 0)
        """Requests each engine has."""
        self._reserved = dict.fromkeys(self._alive, 0)
        """Tokens that those are expected to come to."""
        self._has_room = set(self._alive)
        self._withdrawn: set[str] = set()
        self._home: dict[int, str] = {}
        self._at: dict[str, _AtEngine] = {}
        self._outgoing: dict[str, list[GenerationRequest]] = {}
        self._mean_tokens = 0.0
        self._calls = _Calls()

    @property
    def nobody_left(self) -> RoleDied | None:
        return None if self._alive else self._deaths.of(list(self._engines.values()))

    @property
    def load_of_living(self) -> dict[str, int]:
        return {name: self.load[name] for name in self._alive}

    def assign(self, group: int, request: GenerationRequest) -> str | None:
        """Give a request of a group to an engine, with the next `send`; None where all have enough for now."""
        name = self._choose(self._home.get(group))
        if name is None:
            return None
        expected = self._expected_tokens(request)
        self._home[group] = name
        self._at[request.request_id] = _AtEngine(name, expected)
        self._outgoing.setdefault(name, []).append(request)
        self.load[name] += 1
        self._reserved[name] += expected
        if self._is_taken(name, self._slots + self._bite):
            self._has_room.discard(name)
        return name

    def send(self) -> None:
        """All that was assigned since the last time, in one call per engine."""
        outgoing, self._outgoing = self._outgoing, {}
        for name, requests in outgoing.items():
            left, engine = {request.request_id: None for request in requests}, self._alive[name]

            def failed(error: BaseException, engine: EngineClient = engine, left: dict[str, None] = left) -> None:
                self._failed(engine, list(left), error)

            self._calls.start(self._generate(engine, requests, left), failed)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Engines need not go on with these. One that dies over it is known by its completions, which do not come."""
        ids_of: dict[str, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._at:
                ids_of.setdefault(self._at[request_id].name, []).append(request_id)
        for name, ids in ids_of.items():
            if name in self._alive:
                self._calls.start(self._alive[name].abort(ids), self._abort_failed)

    def withdraw(self, names: Collection[str]) -> list[str]:
        """Assign nothing to these engines until they are given back; what they have now."""
        self._withdrawn |= set(names)
        self._has_room -= self._withdrawn
        return [request_id for request_id, at in self._at.items() if at.name in self._withdrawn]

    def give_back(self, names: Collection[str]) -> None:
        self._withdrawn -= set(names)
        for name in names:
            self._freed(name)

    def is_quiet(self, names: Collection[str]) -> bool:
        return not any(self.load.get(name) for name in names)

    def welcome(self, engine: EngineClient) -> None:
        """One that is new, or takes the place of a dead one of the same name, whose calls may still be about to fail."""
        self._engines[engine.name] = self._alive[engine.name] = engine
        self.load.setdefault(engine.name, 0)
        self._reserved.setdefault(engine.name, 0)
        self._freed(engine.name)

    def forget(self, group: int) -> None:
        self._home.pop(group, None)

    def cancel(self) -> None:
        self._calls.cancel()

    def _choose(self, home: str | None) -> str | None:
        """The engine with least to do, or the home of the group if that is not well behind."""
        if not self._has_room:
            return None
        name = min((name for name in self._alive if name in self._has_room), key=self.load.__getitem__)
        if home in self._has_room and self.load[home] - self.load[name] <= self._bite:
            return home
        return name

    def _expected_tokens(self, request: GenerationRequest) -> int:
        """Of a whole sequence, by what completions came to so far; at first, that each may become as long as it can."""
        length = min(request.max_new_tokens, round(self._mean_tokens)) if self._mean_tokens else request.max_new_tokens
        return len(request.prompt_ids) + max(length, len(request.prefix_ids))

    def _is_taken(self, name: str, slots: int) -> bool:
        if self.load[name] >= slots:
            return True
        # One request is let in always: a cache that is too small for it is the engine's to complain of.
        return self._cache_tokens is not None and self.load[name] > 0 and self._reserved[name] >= self._cache_tokens

    async def _generate(self, engine: EngineClient, requests: list[GenerationRequest], left: dict[str, None]) -> None:
        async for completions in engine.generate(requests):
            for completion in completions:
                assert completion.request_id in left, f"{engine.name} gave {completion.request_id} unasked, or twice"
                del left[completion.request_id]
                if completion.ending is not Ending.ABORTED:
                    self._mean_tokens += SMOOTHING * (len(completion.token_ids) - self._mean_tokens)
            self._left(completion.request_id for completion in completions)
            self._tell(Completed(completions))
        assert not left, f"{engine.name} gave no completion for {', '.join(left)}"

    def _left(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            at = self._at.pop(request_id)
            self.load[at.name] -= 1
            self._reserved[at.name] -= at.num_tokens
            self._freed(at.name)

    def _freed(self, name: str) -> None:
        if name in self._alive and name not in self._withdrawn and not self._is_taken(name, self._slots + 1):
            self._has_room.add(name)

    def _abort_failed(self, error: BaseException) -> None:
        if not isinstance(error, RoleDied):
            self._tell(GenerationFailed([], error))

    def _failed(self, engine: EngineClient, request_ids: list[str], error: BaseException) -> None:
        if isinstance(error, RoleDied) and self._engines[engine.name] is engine:
            self._deaths.note(engine.name, error)
            self._alive.pop(engine.name, None)
            self._has_room.discard(engine.name)
        self._left(request_ids)
        self._tell(GenerationFailed(request_ids, error))


class GraderPool:
    def __init__(self, graders: Sequence[GraderClient], deaths: DeadRoles, tell: Tell):
        self._graders = {grader.name: grader for grader in graders}
        self._deaths = deaths
        self._tell = tell
        self._alive = {grader.name: grader for grader in graders if grader.name not in deaths.sentences}
        self._next = 0
        self._calls = _Calls()

    @property
    def nobody_left(self) -> RoleDied | None:
        return None if self._alive else self._deaths.of(list(self._graders.values()))

    def welcome(self, grader: GraderClient) -> None:
        """One that takes the place of a dead one of the same name."""
        self._graders[grader.name] = self._alive[grader.name] = grader

    def send(self, items: list[GradingItem]) -> None:
        """Shared out over the graders, each in its turn."""
        alive = list(self._alive.values())
        size = max(1, min(GRADED_AT_ONCE, -(-len(items) // len(alive))))
        for start in range(0, len(items), size):
            grader = alive[self._next % len(alive)]
            self._next += 1
            part = items[start : start + size]

            def failed(error: BaseException, grader: GraderClient = grader, part: list[GradingItem] = part) -> None:
                self._failed(grader, part, error)

            self._calls.start(self._grade(grader, part), failed)

    def cancel(self) -> None:
        self._calls.cancel()

    async def _grade(self, grader: GraderClient, items: list[GradingItem]) -> None:
        answers = await grader.grade(items)
        self._tell(Graded(list(zip(items, answers, strict=True))))

    def _failed(self, grader: GraderClient, items: list[GradingItem], error: BaseException) -> None:
        if isinstance(error, RoleDied) and self._graders[grader.name] is grader:
            self._deaths.note(grader.name, error)
            self._alive.pop(grader.name, None)
        self._tell(GradingFailed(items, error))
