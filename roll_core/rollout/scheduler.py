"""Turns a request for groups into graded trajectories: every attempt generated, graded the moment it ends, put in its group.

Who does what: `lifecycle.py` decides, `router.py` talks to engines and graders, and the stage below carries messages between
the two. Knows no files: what is finished is put where the caller can see it, so that a failure costs nothing generated.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from roll_core.config.rollout import RolloutConfig
from roll_core.data.problem_source import ProblemSource
from roll_core.errors import DeadlineExceeded, RewardUnavailable, RoleDied, RollError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.filter import is_useful
from roll_core.rollout.lifecycle import Lifecycle, Place, State, Terms
from roll_core.rollout.metrics import describe_lives
from roll_core.rollout.renderer import Renderer
from roll_core.rollout.router import (
    Answer,
    Answered,
    Completed,
    Deaths,
    EngineClient,
    Event,
    GraderClient,
    GraderPool,
    Item,
    NotGenerated,
    NotGraded,
    Router,
)
from roll_core.seeds import derive_seed
from roll_core.types.manifest import CollectRequest, DrawOutcome, Draws, Metrics
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Failure, Problem, Score, Trajectory, Turn

Finished = dict[Place, Trajectory]
"""Trajectories generated to their end by group and attempt, graded or not."""


@dataclass(frozen=True)
class Attempt:
    """One trajectory to be: which problem, which place in its group, and what is asked of the engine."""

    problem: Problem
    place: Place
    request: GenerationRequest


@dataclass(frozen=True)
class Rollout:
    """What a collect comes to: the batch, in order; what became of every problem drawn; and what it took."""

    trajectories: list[Trajectory]
    draws: Draws
    metrics: Metrics


class RolloutScheduler:
    def __init__(
        self,
        config: RolloutConfig,
        *,
        seed: int,
        source: ProblemSource,
        renderer: Renderer,
        engines: Sequence[EngineClient],
        graders: Sequence[GraderClient],
        greedy_baseline: bool = False,
    ):
        self._config = config
        self._seed = seed
        self._source = source
        self._renderer = renderer
        self._engines = engines
        self._graders = graders
        self._greedy_baseline = greedy_baseline
        self._deaths = Deaths()

    async def collect(self, request: CollectRequest, deadline_s: float, finished: Finished | None = None) -> Rollout:
        """As many groups as a request asks for, from its first problem on, every attempt graded or carrying its failure.

        Without redundancy the answer is the same whatever the timing, however often it is asked. With it, what is consumed
        depends on who finished first; an answer that was stored is what happened, and is not collected again.

        `finished` holds what an earlier collect of the same request had; only what is missing there is generated, and graded
        what has no grade. It is filled on the way, for whoever has to keep it when this fails.
        """
        config = self._config
        terms = Terms(
            num_groups=request.num_groups,
            group_size=config.group_size,
            greedy_baseline=self._greedy_baseline,
            redundant_groups=config.redundant_groups,
            redundant_attempts=config.redundant_attempts,
            max_draws=int(config.max_draws * request.num_groups) + config.redundant_groups,
            is_useful=None if config.filter is None else partial(is_useful, config.filter),
        )

        def attempts(places: Sequence[Place]) -> list[Attempt]:
            index = request.first_problem + places[0][0]
            return self._attempts(self._source.problem(index), places, config.temperature, index)

        lives = await self._run(terms, attempts, finished := {} if finished is None else finished, deadline_s, "collect")
        return Rollout(
            trajectories=[finished[place] for place in lives.consumed],
            draws=Draws(first=request.first_problem, outcomes=lives.outcomes),
            metrics=describe_lives(lives.groups),
        )

    async def evaluate(self, num_problems: int, deadline_s: float) -> list[Trajectory]:
        """One greedy attempt at each held-out problem."""
        problems = self._source.held_out(num_problems)
        finished: Finished = {}

        def attempts(places: Sequence[Place]) -> list[Attempt]:
            group = places[0][0]
            return self._attempts(problems[group], places, 0.0, group)

        lives = await self._run(Terms(num_problems, group_size=1), attempts, finished, deadline_s, "evaluate")
        return [finished[place] for place in lives.consumed]

    def _attempts(self, problem: Problem, places: Sequence[Place], temperature: float, index: int) -> list[Attempt]:
        """Attempts at the problem at an index of the stream; a problem that comes up again is attempted anew."""
        prompt_ids = self._renderer.prompt(problem.messages)
        return [
            Attempt(
                problem,
                (group, number),
                GenerationRequest(
                    request_id=f"{group}/{number}",
                    prompt_ids=prompt_ids,
                    max_new_tokens=self._config.max_new_tokens,
                    temperature=0.0 if number == GREEDY_ATTEMPT else temperature,
                    stop_token_ids=self._renderer.stop_token_ids,
                    seed=derive_seed(self._seed, "attempt", index, number),
                ),
            )
            for group, number in places
        ]

    async def _run(
        self,
        terms: Terms,
        attempts: Callable[[Sequence[Place]], list[Attempt]],
        finished: Finished,
        deadline_s: float,
        stage: str,
    ) -> Lifecycle:
        """A stage to its end, and only then the first failure: what other engines are at is not lost to a sick one."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        router = Router(self._engines, self._config.slots_per_engine, self._deaths, events.put_nowait)
        pool = GraderPool(self._graders, self._deaths, events.put_nowait)
        under_way = _Stage(terms, attempts, finished, router, pool, self._renderer)
        try:
            async with asyncio.timeout(deadline_s):
                await under_way.run(events)
        except TimeoutError:
            total = under_way.lives.num_attempts
            late = ", ".join(f"{name} ({left} of {total} attempts)" for name, left in router.load.items() if left)
            raise DeadlineExceeded(
                f"deadlines.{stage}: after {deadline_s:.0f} s still waiting for {late or 'the reward workers'}"
            ) from None
        finally:
            router.cancel()
            pool.cancel()
        if under_way.failures:
            raise under_way.failures[0]
        if not under_way.lives.is_full:
            raise RollError(_too_few(under_way.lives, terms))
        return under_way.lives


class _Stage:
    """One collect or evaluation: tells the lifecycle what happened, and does what it says is to be done."""

    def __init__(
        self,
        terms: Terms,
        attempts: Callable[[Sequence[Place]], list[Attempt]],
        finished: Finished,
        router: Router,
        pool: GraderPool,
        renderer: Renderer,
    ):
        self._now = asyncio.get_running_loop().time
        self.lives = Lifecycle(terms, self._now())
        self.failures: list[BaseException] = []
        self._make_attempts = attempts
        self._attempts: dict[Place, Attempt] = {}
        self._place_of: dict[str, Place] = {}
        self._finished = finished
        self._router = router
        self._pool = pool
        self._renderer = renderer

    async def run(self, events: asyncio.Queue[Event]) -> None:
        """Until nothing is under way. Events that came together are taken together, so that calls stay few."""
        self._act()
        while not self.lives.is_settled:
            self._take(await events.get())
            while not events.empty():
                self._take(events.get_nowait())
            self._act()

    # ---------------------------------------------------------------------------------------------- what is to be done
    def _act(self) -> None:
        while drawn := self.lives.new_draws():
            for group in drawn:
                self._begin(group)
        self._generate()
        if places := self.lives.to_grade(self._now()):
            self._grade(places)
        if places := self.lives.to_abort():
            self._router.abort([self._attempts[place].request.request_id for place in places])

    def _begin(self, group: int) -> None:
        """Attempts at a problem that was drawn; what is known of them already is as if it happened now."""
        for attempt in self._make_attempts(self.lives.places_of(group)):
            self._attempts[attempt.place] = attempt
            self._place_of[attempt.request.request_id] = attempt.place
        for place in self.lives.places_of(group):
            known = self._finished.get(place)
            if known is not None and self.lives.state_of(place) is State.QUEUED:
                self.lives.generating(place, self._now())
                self._generated(place, known)

    def _generate(self) -> None:
        failure = self._router.nobody_left
        while (place := self.lives.next_queued()) is not None:
            if failure is not None:
                self._fail(failure, [place])
            elif self._router.assign(place[0], self._attempts[place].request):
                self.lives.generating(place, self._now())
            else:
                break
        self._router.send()

    def _grade(self, places: list[Place]) -> None:
        if failure := self._pool.nobody_left:
            self._fail(failure, places)
        else:
            self._pool.send([(self._attempts[place].problem, self._finished[place]) for place in places])

    # ---------------------------------------------------------------------------------------------- what happened
    def _take(self, event: Event) -> None:
        match event:
            case Completed():
                for completion in event.completions:
                    self._completed(completion)
            case NotGenerated():
                self._came_to_nothing([self._place_of[request_id] for request_id in event.request_ids], event.error)
            case Answered():
                for item, answer in event.answers:
                    self._answered(item, answer)
            case NotGraded():
                self._came_to_nothing([_place(trajectory) for _, trajectory in event.items], event.error)

    def _completed(self, completion: Completion) -> None:
        place = self._place_of[completion.request_id]
        if self.lives.state_of(place) is State.ABORTING:
            self.lives.generated(place, len(completion.token_ids), self._now())
            return
        self._finished[place] = self._as_trajectory(self._attempts[place], completion)
        self._generated(place, self._finished[place])

    def _generated(self, place: Place, trajectory: Trajectory) -> None:
        self.lives.generated(place, trajectory.num_completion_tokens, self._now())
        if trajectory.score is not None:
            self.lives.graded(place, trajectory.score.value, self._now())
        elif trajectory.failure is not None:
            self.lives.graded(place, None, self._now())

    def _answered(self, item: Item, answer: Answer) -> None:
        _, trajectory = item
        place = _place(trajectory)
        if isinstance(answer, RewardUnavailable):
            if self.lives.state_of(place) is not State.ABORTED:
                self._fail(answer, [place])
            return
        self._finished[place] = _graded(trajectory, answer)
        self.lives.graded(place, answer.value if isinstance(answer, Score) else None, self._now())

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


def _graded(trajectory: Trajectory, answer: Score | Failure) -> Trajectory:
    if isinstance(answer, Failure):
        return replace(trajectory, failure=answer)
    return replace(trajectory, score=answer)


def _too_few(lives: Lifecycle, terms: Terms) -> str:
    outcomes = [group.outcome for group in lives.groups]
    return (
        f"rollout.max_draws: of {len(outcomes)} problems drawn only {lives.num_accepted} were useful, and "
        f"{terms.num_groups} are needed ({outcomes.count(DrawOutcome.FILTERED)} left out by rollout.filter, "
        f"{outcomes.count(DrawOutcome.FAILED)} could not be graded): make the filter milder, raise max_draws, or choose "
        "problems that the policy solves sometimes"
    )
