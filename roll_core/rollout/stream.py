"""A stream of problems on its way to batches: carries messages between what decides (`lifecycle.py`) and those who work
(`router.py`), in the background until it is closed. The rollout scheduler has one for training, and one for each evaluation.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roll_core.config.rollout import InFlightPolicy
from roll_core.errors import RewardUnavailable, RoleDied, RollError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.lifecycle import Lifecycle, Page, Phase, Place
from roll_core.rollout.meters import Meters
from roll_core.rollout.renderer import Renderer
from roll_core.rollout.router import (
    Completed,
    EngineClient,
    GenerationFailed,
    Grade,
    Graded,
    GraderClient,
    GraderPool,
    GradingFailed,
    GradingItem,
    RolloutEvent,
    Router,
)
from roll_core.rollout.tracing import trace_of
from roll_core.types.manifest import DrawOutcome, Metrics
from roll_core.types.routing import extended
from roll_core.types.trace import AttemptTrace
from roll_core.types.trajectory import Ending, Failure, Problem, Score, Trajectory, Turn

Finished = dict[Place, Trajectory]
"""Trajectories generated to their end, graded or not, by problem and attempt. Their `group` is the problem's place in the
stream; in a batch it is the place in the batch's page."""
Partial = dict[Place, Completion]
"""What there is of attempts that were interrupted."""
Keep = Callable[[Trajectory], None]
NOBODY = ""
"""The engine of an attempt that was finished before."""
NO_PROGRESS = 16
"""An attempt that comes back so often without another token is not going to get anywhere."""
FAREWELL_S = 10.0
"""How long engines may take to end what nobody waits for any more."""


def nobody(trajectory: Trajectory) -> None:
    """Keep it nowhere."""


@dataclass(frozen=True)
class Attempt:
    """One trajectory to be: which problem, which place in its group, and what is asked of the engine."""

    problem: Problem
    place: Place
    request: GenerationRequest


@dataclass(frozen=True)
class Batch:
    page: Page
    trajectories: list[Trajectory]
    trace: list[AttemptTrace]


class Stream:
    """Tells the lifecycle what happened, and does what it says is to be done, in the background until it is closed."""

    def __init__(
        self,
        lives: Lifecycle,
        attempts: Callable[[Sequence[Place]], list[Attempt]],
        finished: Finished,
        partial: Partial,
        router: Router,
        pool: GraderPool,
        events: asyncio.Queue[RolloutEvent],
        renderer: Renderer,
        keep: Keep,
        meters: Meters,
    ):
        self._now = asyncio.get_running_loop().time
        self._epoch = time.time() - self._now()
        """What to add to our times to get those of the world."""
        self.lives = lives
        self.router = router
        self.failures: list[BaseException] = []
        self._make_attempts = attempts
        self._attempts: dict[Place, Attempt] = {}
        self._place_of: dict[str, Place] = {}
        self._finished = finished
        self._partial = partial
        self._fruitless: dict[Place, int] = {}
        self._pool = pool
        self._events = events
        self._renderer = renderer
        self._keep = keep
        self._meters = meters
        self._progress = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self._progress.set())

    # ---------------------------------------------------------------------------------------------- what others ask for
    async def next_batch(self) -> Batch:
        """The next batch, once it is full and engines have ended what it makes superfluous.

        A failure is raised when nothing is under way any more: what other engines are at is not lost to a sick one.
        """
        await self._until(lambda: self.lives.is_full or self.lives.is_settled)
        if not self.lives.is_full:
            raise self.failures[0] if self.failures else RollError(_too_few(self.lives))
        page = self.lives.take(self._now())
        self._act()
        await self._until(lambda: not self.lives.is_aborting)
        lengths = {group.number: len(self._attempts[group.attempts[0].place].request.prompt_ids) for group in page.groups}
        trace = trace_of(page, lengths, self._finished, self._now(), self._epoch)
        batch = Batch(page, [self._finished[place] for place in page.consumed], trace)
        self._forget(page)
        return batch

    def read_meters(self) -> Metrics:
        """Of the time since the last batch."""
        return self._meters.read(self._now())

    def adopted(self, version: int) -> None:
        self.lives.adopted(version, self._now())
        self._act()

    async def withdraw(self, engines: Sequence[str], in_flight: InFlightPolicy) -> None:
        ids = self.router.withdraw(engines)
        if in_flight is not InFlightPolicy.FINISH:
            self.router.abort(ids)
        await self._until(lambda: self.router.is_quiet(engines))

    def give_back(self, engines: Sequence[str]) -> None:
        self.router.give_back(engines)
        self._act()

    def welcome(self, engines: Sequence[EngineClient], graders: Sequence[GraderClient]) -> None:
        for engine in engines:
            self.router.welcome(engine)
        for grader in graders:
            self._pool.welcome(grader)
        self._act()

    async def close(self) -> None:
        """End what engines have, and stop. One that does not answer is not waited for."""
        try:
            with contextlib.suppress(TimeoutError, RollError):
                async with asyncio.timeout(FAREWELL_S):
                    await self.withdraw(list(self.router.load), InFlightPolicy.RESUME)
        finally:
            self._task.cancel()
            self.router.cancel()
            self._pool.cancel()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._task.done():
                self._task.result()
            self._progress.clear()
            await self._progress.wait()

    async def _run(self) -> None:
        """Events that came together are taken together, so that calls stay few."""
        self._act()
        while True:
            self._take(await self._events.get())
            while not self._events.empty():
                self._take(self._events.get_nowait())
            self._act()
            self._progress.set()

    # ---------------------------------------------------------------------------------------------- what is to be done
    def _act(self) -> None:
        while drawn := self.lives.new_draws():
            for group in drawn:
                self._begin(group)
        self._generate()
        if places := self.lives.to_grade(self._now()):
            self._grade(places)
        if places := self.lives.to_abort():
            self.router.abort([self._attempts[place].request.request_id for place in places])
        lives = self.lives
        self._meters.set(self.router.load_of_living, lives.num_queued, lives.num_grading, lives.num_accepted, self._now())

    def _begin(self, group: int) -> None:
        """Attempts at a problem that was drawn; what is known of them already is as if it happened now."""
        for attempt in self._make_attempts(self.lives.places_of(group)):
            self._attempts[attempt.place] = attempt
            self._place_of[attempt.request.request_id] = attempt.place
        for place in self.lives.places_of(group):
            known = self._finished.get(place)
            if known is not None and self.lives.state_of(place) is Phase.QUEUED:
                self.lives.generating(place, NOBODY, self._now())
                self._generated(place, known)

    def _generate(self) -> None:
        failure = self.router.nobody_left
        while (place := self.lives.next_queued()) is not None:
            if failure is not None:
                self._fail(failure, [place])
                continue
            engine = self.router.assign(place[0], self._request(place))
            if engine is None:
                break
            self.lives.generating(place, engine, self._now())
        self.router.send()

    def _request(self, place: Place) -> GenerationRequest:
        """For all of an attempt, or for what it lacks."""
        request, partial = self._attempts[place].request, self._partial.get(place)
        return request if partial is None else replace(request, prefix_ids=partial.token_ids)

    def _grade(self, places: list[Place]) -> None:
        if failure := self._pool.nobody_left:
            self._fail(failure, places)
        else:
            self._pool.send([(self._attempts[place].problem, self._finished[place]) for place in places])

    def _forget(self, page: Page) -> None:
        """Nothing is left of a batch's attempts but, perhaps, grades that nobody waits for."""
        for group in page.groups:
            self.router.forget(group.number)
            for life in group.attempts:
                del self._place_of[self._attempts.pop(life.place).request.request_id]
                for kept in (self._finished, self._partial, self._fruitless):
                    kept.pop(life.place, None)

    # ---------------------------------------------------------------------------------------------- what happened
    def _take(self, event: RolloutEvent) -> None:
        match event:
            case Completed():
                for completion in event.completions:
                    self._completed(completion)
            case GenerationFailed():
                self._came_to_nothing([self._place_of[request_id] for request_id in event.request_ids], event.error)
            case Graded():
                now = self._now()  # the same for all of a call, which is how a trace shows what was graded together
                for item, answer in event.answers:
                    self._answered(item, answer, now)
            case GradingFailed():
                self._came_to_nothing([_place(trajectory) for _, trajectory in event.items], event.error)

    def _completed(self, completion: Completion) -> None:
        place = self._place_of[completion.request_id]
        whole = _joined(self._partial.pop(place, None), completion)
        if self.lives.state_of(place) is Phase.ABORTING:
            self.lives.generated(place, len(whole.token_ids), self._now())
        elif whole.ending is not Ending.ABORTED:
            self._finished[place] = self._as_trajectory(self._attempts[place], whole)
            self._keep(self._finished[place])
            self._generated(place, self._finished[place])
        else:
            self._interrupted(place, whole, num_new=len(completion.token_ids))

    def _interrupted(self, place: Place, so_far: Completion, num_new: int) -> None:
        """It goes on from where it was, unless that leads nowhere."""
        self._fruitless[place] = 0 if num_new else self._fruitless.get(place, 0) + 1
        if self._fruitless[place] == NO_PROGRESS:
            self._finished[place] = self._as_trajectory(self._attempts[place], so_far)
            self._generated(place, self._finished[place])
            return
        self._partial[place] = so_far
        self.lives.interrupted(place, len(so_far.token_ids), self._now())

    def _generated(self, place: Place, trajectory: Trajectory) -> None:
        self.lives.generated(place, trajectory.num_completion_tokens, self._now())
        if trajectory.score is not None:
            self.lives.graded(place, trajectory.score.value, self._now())
        elif trajectory.failure is not None:
            self.lives.graded(place, None, self._now())

    def _answered(self, item: GradingItem, answer: Grade, now: float) -> None:
        _, trajectory = item
        place = _place(trajectory)
        if not self.lives.awaits_grade(place):
            return
        if isinstance(answer, RewardUnavailable):
            self._fail(answer, [place])
            return
        self._finished[place] = _graded(trajectory, answer)
        self._keep(self._finished[place])
        self.lives.graded(place, answer.value if isinstance(answer, Score) else None, now)

    def _came_to_nothing(self, places: list[Place], error: BaseException) -> None:
        """Somebody else may still do what the dead cannot; any other failure is the stage's."""
        if not isinstance(error, RoleDied):
            self._fail(error, places)
            return
        for place in places:
            self.lives.lost(place, self._now())

    def _fail(self, error: BaseException, places: list[Place]) -> None:
        self.failures.append(error)
        for place in places:
            self.lives.abandoned(place, self._now())

    def _as_trajectory(self, attempt: Attempt, completion: Completion) -> Trajectory:
        turn = Turn(
            prompt_ids=attempt.request.prompt_ids,
            completion_ids=completion.token_ids,
            sampler_logprobs=completion.sampler_logprobs,
            weights_versions=completion.weights_versions,
            text=self._renderer.text(completion.token_ids),
            experts=completion.experts,
        )
        group, number = attempt.place
        return Trajectory(
            problem_id=attempt.problem.problem_id,
            domain=attempt.problem.domain,
            group=group,
            attempt=number,
            turns=(turn,),
            ending=completion.ending,
            score=None,
            failure=Failure("generate", "aborted") if completion.ending is Ending.ABORTED else None,
        )


def _place(trajectory: Trajectory) -> Place:
    return trajectory.group, trajectory.attempt


def _joined(partial: Completion | None, rest: Completion) -> Completion:
    """A completion that was made in pieces."""
    if partial is None:
        return rest
    return Completion(
        request_id=rest.request_id,
        token_ids=partial.token_ids + rest.token_ids,
        sampler_logprobs=partial.sampler_logprobs + rest.sampler_logprobs,
        weights_versions=partial.weights_versions + rest.weights_versions,
        ending=rest.ending,
        experts=extended(partial.experts, rest.experts),
    )


def _graded(trajectory: Trajectory, answer: Score | Failure) -> Trajectory:
    if isinstance(answer, Failure):
        return replace(trajectory, failure=answer)
    return replace(trajectory, score=answer)


def _too_few(lives: Lifecycle) -> str:
    outcomes = [group.outcome for group in lives.open_page.groups]
    return (
        f"rollout.max_draws: of {len(outcomes)} problems drawn only {lives.num_accepted} were useful, and "
        f"{lives.terms.num_groups} are needed ({outcomes.count(DrawOutcome.FILTERED)} left out by rollout.filter, "
        f"{outcomes.count(DrawOutcome.FAILED)} could not be graded): make the filter milder, raise max_draws, or choose "
        "problems that the policy solves sometimes"
    )
