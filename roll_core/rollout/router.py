"""Routing of requests to engines and of trajectories to graders, for one stream. Used by `stream.py`.

An attempt goes to the least loaded engine, or to the engine that has others of its group (and their prompt in its KV cache)
unless that engine is well behind. Requests that become ready together travel in one call per engine, because a call costs
more than a token. A dead role gets nothing more, and its work goes to the others. Sampled tokens depend on seed and weights
alone, so rerouting does not change them. Results and failures are emitted as the events below.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from roll_core.config.rollout import RolloutConfig
from roll_core.errors import RewardUnavailable, RoleDied
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.types.trajectory import Ending, Failure, Problem, Score, Trajectory

GRADED_AT_ONCE = 256
"""Maximum trajectories in one call to a grader. Trajectories that end together are first split over all graders."""
REFILLS_PER_ENGINE = 4
"""Number of refills that fill the slots of an engine: a refill is a quarter of its slots. An engine holds one request per
slot plus one refill, which waits there, so that a free slot is filled without a message. A refill is sent as a whole, so
that calls stay few."""
SMOOTHING = 0.01
"""Weight of the newest completion in the moving average of completion lengths: a window of about 100 completions."""

MAX_GRADER_DEATHS = 3
"""Graders that may die with one trajectory; then its grade counts as failed. A grader dies of a reward that crashes it, or
that blocks it for `deadlines.heartbeat`, and by chance. After the first death the trajectory is graded alone, so that only
the one at fault goes on to the third."""

GradingItem = tuple[Problem, Trajectory]
"""Trajectory to grade, with its problem."""
Grade = Score | Failure | RewardUnavailable
"""Result of grading: a score, a failure of this trajectory alone, or an outage of the reward."""


class EngineClient(Protocol):
    """Client of one inference engine."""

    @property
    def name(self) -> str: ...

    def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        """Yield completions in the order they finish, several at a time."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests now. `generate` yields them with the tokens so far. Unknown and finished ids are ignored."""
        ...


class GraderClient(Protocol):
    """Client of one reward worker."""

    @property
    def name(self) -> str: ...

    def grade(self, items: list[GradingItem]) -> AsyncIterator[list[tuple[int, Grade]]]:
        """Yield (index of the item, its grade) in the order items are graded, several at a time. An outage is a grade, not
        raised: the other items keep theirs."""
        ...


@dataclass(frozen=True)
class Completed:
    """Event: an engine finished or aborted these requests."""

    completions: list[Completion]


@dataclass(frozen=True)
class GenerationFailed:
    """Event: a call to an engine failed with these requests. After a `RoleDied` another engine can have them."""

    request_ids: list[str]
    error: BaseException


@dataclass(frozen=True)
class Graded:
    """Event: a grader returned these grades."""

    grades: list[tuple[GradingItem, Grade]]


@dataclass(frozen=True)
class GradingFailed:
    """Event: a call to a grader failed with these items. After a `RoleDied` another grader can have them."""

    items: list[GradingItem]
    error: BaseException


RolloutEvent = Completed | GenerationFailed | Graded | GradingFailed
Emit = Callable[[RolloutEvent], None]
"""Receiver of events, such as `queue.put_nowait`."""


@dataclass
class DeadRoles:
    """Register of dead engines and graders with their causes. It outlives a stream: roles stay dead until succeeded."""

    causes: dict[str, str] = field(default_factory=dict)
    """Error message by role name."""
    graders_lost: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of graders that died with an answer that is not graded yet, by problem id and text."""

    def record(self, name: str, error: RoleDied) -> None:
        """Record that a role died, with the error that reported it."""
        self.causes[name] = str(error)

    def error_for(self, clients: Sequence[EngineClient] | Sequence[GraderClient]) -> RoleDied:
        """Build the error of a stage whose engines, or graders, are all dead."""
        causes = [self.causes[client.name] for client in clients if client.name in self.causes]
        return RoleDied("; ".join(causes) + ("; none is left" if len(causes) > 1 else ""))


class _Calls:
    """Set of calls in flight. A failed call is reported to the callback it was started with."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, call: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]) -> None:
        """Start a call; `failed` gets its exception, if it raises one."""
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failed(error)

        task.add_done_callback(ended)

    def cancel(self) -> None:
        """Cancel all calls in flight; their `failed` is not called."""
        for task in self._tasks:
            task.cancel()


@dataclass(frozen=True)
class _AtEngine:
    """Engine that has a request, and the tokens reserved for it there."""

    name: str
    """Name of the engine."""
    num_tokens: int
    """Expected prompt and completion tokens."""


class Router:
    """Router of generation requests to engines.

    An engine has room for as many requests as it has slots, and one refill more, which wait there. If
    `rollout.tokens_per_engine` says how many tokens its KV cache holds, the expected tokens have to fit as well.
    """

    def __init__(self, engines: Sequence[EngineClient], config: RolloutConfig, dead_roles: DeadRoles, emit: Emit):
        self._engines = {engine.name: engine for engine in engines}
        self._dead_roles = dead_roles
        self._emit = emit
        self._slots = config.slots_per_engine
        self._refill_size = -(-config.slots_per_engine // REFILLS_PER_ENGINE)
        self._cache_tokens = config.tokens_per_engine
        self._alive = {engine.name: engine for engine in engines if engine.name not in dead_roles.causes}
        self.load = dict.fromkeys(self._alive, 0)
        """Number of requests by engine."""
        self._reserved = dict.fromkeys(self._alive, 0)
        """Expected tokens of these requests, by engine."""
        self._has_room = set(self._alive)
        """Engines that can be given a request."""
        self._suspended: set[str] = set()
        self._home: dict[int, str] = {}
        """Engine that got the group's last request, by group."""
        self._at: dict[str, _AtEngine] = {}
        self._outgoing: dict[str, list[GenerationRequest]] = {}
        self._mean_tokens = 0.0
        self._calls = _Calls()

    @property
    def no_survivors_error(self) -> RoleDied | None:
        """Error to raise if every engine is dead; None while one is alive."""
        return None if self._alive else self._dead_roles.error_for(list(self._engines.values()))

    @property
    def load_by_engine(self) -> dict[str, int]:
        """Number of requests by living engine."""
        return {name: self.load[name] for name in self._alive}

    def assign(self, group: int, request: GenerationRequest) -> str | None:
        """Assign a request to an engine, which gets it with the next `send`. None if no engine has room."""
        name = self._choose(self._home.get(group))
        if name is None:
            return None
        expected = self._expected_tokens(request)
        self._home[group] = name
        self._at[request.request_id] = _AtEngine(name, expected)
        self._outgoing.setdefault(name, []).append(request)
        self.load[name] += 1
        self._reserved[name] += expected
        if self._is_taken(name, self._slots + self._refill_size):
            self._has_room.discard(name)
        return name

    def send(self) -> None:
        """Send the requests assigned since the last call, in one call per engine."""
        outgoing, self._outgoing = self._outgoing, {}
        for name, requests in outgoing.items():
            pending, engine = {request.request_id: None for request in requests}, self._alive[name]

            def failed(error: BaseException, engine: EngineClient = engine, pending: dict[str, None] = pending) -> None:
                self._failed(engine, list(pending), error)

            self._calls.start(self._generate(engine, requests, pending), failed)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Tell engines to end these requests. An engine that dies meanwhile is noticed by its `generate` call."""
        ids_of: dict[str, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._at:
                ids_of.setdefault(self._at[request_id].name, []).append(request_id)
        for name, ids in ids_of.items():
            if name in self._alive:
                self._calls.start(self._alive[name].abort(ids), self._abort_failed)

    def suspend(self, names: Collection[str]) -> list[str]:
        """Assign nothing to these engines until `resume`; return the ids of the requests that suspended engines have."""
        self._suspended |= set(names)
        self._has_room -= self._suspended
        return [request_id for request_id, at in self._at.items() if at.name in self._suspended]

    def resume(self, names: Collection[str]) -> None:
        """Assign requests to these engines again."""
        self._suspended -= set(names)
        for name in names:
            self._update_room(name)

    def is_idle(self, names: Collection[str]) -> bool:
        """True if these engines have no requests."""
        return not any(self.load.get(name) for name in names)

    def add_engine(self, engine: EngineClient) -> None:
        """Add a new engine, or the successor of a dead one of the same name, whose calls may still be about to fail."""
        self._engines[engine.name] = self._alive[engine.name] = engine
        self.load.setdefault(engine.name, 0)
        self._reserved.setdefault(engine.name, 0)
        self._update_room(engine.name)

    def forget(self, group: int) -> None:
        """Forget which engine a consumed group was with."""
        self._home.pop(group, None)

    def cancel(self) -> None:
        """Cancel all calls in flight."""
        self._calls.cancel()

    def _choose(self, home: str | None) -> str | None:
        """Least loaded engine with room, or the home of the group unless that is over a refill behind; None without room."""
        if not self._has_room:
            return None
        name = min((name for name in self._alive if name in self._has_room), key=self.load.__getitem__)
        if home in self._has_room and self.load[home] - self.load[name] <= self._refill_size:
            return home
        return name

    def _expected_tokens(self, request: GenerationRequest) -> int:
        """Expected length of the whole sequence, by the mean completion so far; before the first completion, the maximum."""
        length = min(request.max_new_tokens, round(self._mean_tokens)) if self._mean_tokens else request.max_new_tokens
        return len(request.prompt_ids) + max(length, len(request.prefix_ids))

    def _is_taken(self, name: str, slots: int) -> bool:
        """True if the engine has `slots` requests or its KV cache is reserved."""
        if self.load[name] >= slots:
            return True
        # An idle engine always gets a request: if the KV cache is too small even for one, the engine reports the error.
        return self._cache_tokens is not None and self.load[name] > 0 and self._reserved[name] >= self._cache_tokens

    async def _generate(self, engine: EngineClient, requests: list[GenerationRequest], pending: dict[str, None]) -> None:
        async for completions in engine.generate(requests):
            for completion in completions:
                assert completion.request_id in pending, f"{engine.name} gave {completion.request_id} unasked, or twice"
                del pending[completion.request_id]
                if completion.ending is not Ending.ABORTED:
                    self._mean_tokens += SMOOTHING * (len(completion.token_ids) - self._mean_tokens)
            self._remove(completion.request_id for completion in completions)
            self._emit(Completed(completions))
        assert not pending, f"{engine.name} gave no completion for {', '.join(pending)}"

    def _remove(self, request_ids: Iterable[str]) -> None:
        """Release what was reserved for requests that left their engine."""
        for request_id in request_ids:
            at = self._at.pop(request_id)
            self.load[at.name] -= 1
            self._reserved[at.name] -= at.num_tokens
            self._update_room(at.name)

    def _update_room(self, name: str) -> None:
        """Mark an engine as having room once a whole refill fits."""
        if name in self._alive and name not in self._suspended and not self._is_taken(name, self._slots + 1):
            self._has_room.add(name)

    def _abort_failed(self, error: BaseException) -> None:
        if not isinstance(error, RoleDied):
            self._emit(GenerationFailed([], error))

    def _failed(self, engine: EngineClient, request_ids: list[str], error: BaseException) -> None:
        if isinstance(error, RoleDied) and self._engines[engine.name] is engine:
            self._dead_roles.record(engine.name, error)
            self._alive.pop(engine.name, None)
            self._has_room.discard(engine.name)
        self._remove(request_ids)
        self._emit(GenerationFailed(request_ids, error))


class GraderPool:
    """Pool of graders that share the trajectories to grade, in turn."""

    def __init__(self, graders: Sequence[GraderClient], dead_roles: DeadRoles, emit: Emit):
        self._graders = {grader.name: grader for grader in graders}
        self._dead_roles = dead_roles
        self._emit = emit
        self._alive = {grader.name: grader for grader in graders if grader.name not in dead_roles.causes}
        self._next = 0
        self._suspects: deque[GradingItem] = deque()
        """Trajectories that a grader died with. They are graded one at a time."""
        self._suspect: GradingItem | None = None
        """Suspect that is being graded."""
        self._lost_with: dict[str, set[tuple[str, str]]] = {}
        """Answers that each dead grader had, by its name, until it has a successor. A death counts once for an answer, even
        if several calls had it."""
        self._calls = _Calls()

    @property
    def no_survivors_error(self) -> RoleDied | None:
        """Error to raise if every grader is dead; None while one is alive."""
        return None if self._alive else self._dead_roles.error_for(list(self._graders.values()))

    def add_grader(self, grader: GraderClient) -> None:
        """Add a new grader, or the successor of a dead one of the same name."""
        self._graders[grader.name] = self._alive[grader.name] = grader
        self._lost_with.pop(grader.name, None)

    def send(self, items: list[GradingItem]) -> None:
        """Split the items evenly over the graders, round robin; those that a grader died with are graded one at a time."""
        items = self._without_fatal(items)
        unsuspected = [item for item in items if not self._dead_roles.graders_lost[_key(item)]]
        self._suspects += [item for item in items if self._dead_roles.graders_lost[_key(item)]]
        size = max(1, min(GRADED_AT_ONCE, -(-len(unsuspected) // len(self._alive))))
        for start in range(0, len(unsuspected), size):
            self._start(unsuspected[start : start + size])
        self._send_suspect()

    def cancel(self) -> None:
        """Cancel all calls in flight."""
        self._calls.cancel()

    def _send_suspect(self) -> None:
        """Send the next suspect, unless one is being graded."""
        if self._suspect is None and self._suspects and self._alive:
            self._suspect = self._suspects.popleft()
            self._start([self._suspect])

    def _start(self, items: list[GradingItem]) -> None:
        """Start a call of the next grader."""
        alive = list(self._alive.values())
        grader, pending = alive[self._next % len(alive)], dict(enumerate(items))
        self._next += 1
        self._calls.start(self._grade(grader, items, pending), lambda error: self._failed(grader, pending, error))

    async def _grade(self, grader: GraderClient, items: list[GradingItem], pending: dict[int, GradingItem]) -> None:
        async for grades in grader.grade(items):
            for index, _ in grades:
                assert index in pending, f"{grader.name} graded item {index} unasked, or twice"
                self._dead_roles.graders_lost.pop(_key(items[index]), None)
                self._no_longer_suspect(pending.pop(index))
            self._emit(Graded([(items[index], grade) for index, grade in grades]))
        assert not pending, f"{grader.name} gave no grade for {len(pending)} of {len(items)} trajectories"

    def _no_longer_suspect(self, item: GradingItem) -> None:
        """Grade the next suspect, if this item was the last one."""
        if item is self._suspect:
            self._suspect = None
            self._send_suspect()

    def _failed(self, grader: GraderClient, pending: dict[int, GradingItem], error: BaseException) -> None:
        """Report a failed call. If its grader died, that counts against the trajectories it had."""
        lost = list(pending.values())
        if isinstance(error, RoleDied):
            if self._graders[grader.name] is grader:
                self._dead_roles.record(grader.name, error)
                self._alive.pop(grader.name, None)
                self._count_loss(grader.name, {_key(item) for item in lost})
            lost = self._without_fatal(lost)
            self._suspects = deque(self._without_fatal(list(self._suspects)))
        if not self._alive:
            lost += self._suspects
            self._suspects.clear()
        self._emit(GradingFailed(lost, error))
        for item in pending.values():
            self._no_longer_suspect(item)

    def _count_loss(self, name: str, keys: set[tuple[str, str]]) -> None:
        """Count the death of a grader against answers that it had."""
        counted = self._lost_with.setdefault(name, set())
        self._dead_roles.graders_lost.update(keys - counted)
        counted |= keys

    def _without_fatal(self, items: list[GradingItem]) -> list[GradingItem]:
        """Report the grades of answers that too many graders died with as failed; return the other items."""
        is_fatal = [self._dead_roles.graders_lost[_key(item)] >= MAX_GRADER_DEATHS for item in items]
        failed = [(item, _fatal_failure(item)) for item, fatal in zip(items, is_fatal, strict=True) if fatal]
        if failed:
            self._emit(Graded(list(failed)))
        return [item for item, fatal in zip(items, is_fatal, strict=True) if not fatal]


def _key(item: GradingItem) -> tuple[str, str]:
    """Problem id and answer of an item: equal ones get equal grades."""
    problem, trajectory = item
    return problem.problem_id, trajectory.turns[-1].text


def _fatal_failure(item: GradingItem) -> Failure:
    """Failure of an answer that no grader survives."""
    problem, _ = item
    return Failure(
        "grade",
        f"problem {problem.problem_id}: {MAX_GRADER_DEATHS} reward workers in a row died while they graded this answer, or "
        "were ended because it blocked them for deadlines.heartbeat",
    )
