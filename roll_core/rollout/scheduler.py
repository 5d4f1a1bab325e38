"""Turns a request for groups into graded trajectories: every attempt generated, graded the moment it ends, put in its group.

Knows engines and graders only as the two protocols below; the roles on Ray and the tests' in-process ones both fit. Knows no
files either: what is finished is put where the caller can see it, so that a failure costs nothing that was generated.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from roll_core.config.rollout import RolloutConfig
from roll_core.data.problem_source import ProblemSource
from roll_core.errors import DeadlineExceeded, RewardUnavailable
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.renderer import Renderer
from roll_core.seeds import derive_seed
from roll_core.types.manifest import CollectRequest
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Failure, Problem, Score, Trajectory, Turn

GRADED_AT_ONCE = 256
"""Most trajectories sent to a grader in one call; those that end together are shared out over all graders first."""

Finished = dict[tuple[int, int], Trajectory]
"""Trajectories generated to their end by group and attempt, graded or not."""


class EngineClient(Protocol):
    @property
    def name(self) -> str: ...

    def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Completion]]:
        """Completions in the order they finish, several at a time."""
        ...


class GraderClient(Protocol):
    @property
    def name(self) -> str: ...

    async def grade(self, items: list[tuple[Problem, Trajectory]]) -> list[Score | Failure | RewardUnavailable]:
        """One answer per item, in order. What stays unavailable is answered, not raised: its siblings keep their grades."""
        ...


@dataclass(frozen=True)
class Attempt:
    """One trajectory to be: which problem, which place in its group, and what is asked of the engine."""

    problem: Problem
    group: int
    number: int
    request: GenerationRequest

    @property
    def place(self) -> tuple[int, int]:
        return self.group, self.number


@dataclass(frozen=True)
class _Work:
    """What a stage has under way."""

    finished: Finished
    unfinished: dict[str, int]
    """Attempts still to be generated, by the engine that has them."""
    grading: list[asyncio.Task[None]]


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
        self._next_grader = 0

    async def collect(
        self, request: CollectRequest, deadline_s: float, finished: Finished | None = None
    ) -> list[Trajectory]:
        """The groups a request names, in order, every attempt graded or carrying its failure.

        `finished` holds what an earlier collect of the same request had; only what is missing there is generated, and graded
        what has no grade. It is filled on the way, for whoever has to keep it when this fails.
        """
        attempts: list[Attempt] = []
        for group in range(request.num_groups):
            index = request.first_problem + group
            problem, numbers = self._source.problem(index), range(self._config.group_size)
            attempts += self._attempts(problem, group, numbers, self._config.temperature, index)
            if self._greedy_baseline:
                attempts += self._attempts(problem, group, [GREEDY_ATTEMPT], 0.0, index)
        return await self._run(attempts, {} if finished is None else finished, deadline_s, "collect")

    async def evaluate(self, num_problems: int, deadline_s: float) -> list[Trajectory]:
        """One greedy attempt at each held-out problem."""
        attempts: list[Attempt] = []
        for group, problem in enumerate(self._source.held_out(num_problems)):
            attempts += self._attempts(problem, group, [0], 0.0, group)
        return await self._run(attempts, {}, deadline_s, "evaluate")

    def _attempts(
        self, problem: Problem, group: int, numbers: Sequence[int], temperature: float, index: int
    ) -> list[Attempt]:
        """Attempts at the problem at an index of the stream; a problem that comes up again is attempted anew."""
        prompt_ids = self._renderer.prompt(problem.messages)
        requests = (
            GenerationRequest(
                request_id=f"{group}/{number}",
                prompt_ids=prompt_ids,
                max_new_tokens=self._config.max_new_tokens,
                temperature=temperature,
                stop_token_ids=self._renderer.stop_token_ids,
                seed=derive_seed(self._seed, "attempt", index, number),
            )
            for number in numbers
        )
        return [Attempt(problem, group, number, request) for number, request in zip(numbers, requests, strict=True)]

    async def _run(self, attempts: list[Attempt], finished: Finished, deadline_s: float, stage: str) -> list[Trajectory]:
        """Every attempt to its end, and only then the first failure: what other engines are at is not lost to a sick one."""
        shares = self._share_out([attempt for attempt in attempts if attempt.place not in finished])
        unfinished = {engine.name: len(share) for engine, share in zip(self._engines, shares, strict=True)}
        known = [(attempt.problem, finished[attempt.place]) for attempt in attempts if attempt.place in finished]
        work = _Work(finished, unfinished, self._start_grading(known, finished))
        try:
            async with asyncio.timeout(deadline_s):
                generating = (self._generate(*pair, work) for pair in zip(self._engines, shares, strict=True))
                ended = await asyncio.gather(*generating, return_exceptions=True)
                ended += await asyncio.gather(*work.grading, return_exceptions=True)
        except TimeoutError:
            late = ", ".join(f"{name} ({left} of {len(attempts)} attempts)" for name, left in unfinished.items() if left)
            raise DeadlineExceeded(
                f"deadlines.{stage}: after {deadline_s:.0f} s still waiting for {late or 'the reward workers'}"
            ) from None
        finally:
            for task in work.grading:
                task.cancel()
        for failure in ended:
            if failure is not None:
                raise failure
        return [finished[place] for place in sorted(attempt.place for attempt in attempts)]

    def _share_out(self, attempts: list[Attempt]) -> list[list[Attempt]]:
        """Whole groups to each engine in turn, so that a group's prompt is computed once."""
        shares: list[list[Attempt]] = [[] for _ in self._engines]
        for attempt in attempts:
            shares[attempt.group % len(shares)].append(attempt)
        return shares

    async def _generate(self, engine: EngineClient, share: list[Attempt], work: _Work) -> None:
        if not share:
            return
        attempt_of = {attempt.request.request_id: attempt for attempt in share}
        async for completions in engine.generate([attempt.request for attempt in share]):
            ended = [self._as_trajectory(attempt_of[c.request_id], c) for c in completions]
            work.unfinished[engine.name] -= len(ended)
            work.finished.update({(t.group, t.attempt): t for _, t in ended})
            work.grading.extend(self._start_grading(ended, work.finished))

    def _as_trajectory(self, attempt: Attempt, completion: Completion) -> tuple[Problem, Trajectory]:
        turn = Turn(
            prompt_ids=attempt.request.prompt_ids,
            completion_ids=completion.token_ids,
            sampler_logprobs=completion.sampler_logprobs,
            weights_versions=completion.weights_versions,
            text=self._renderer.text(completion.token_ids),
        )
        problem = attempt.problem
        aborted = Failure("generate", "aborted") if completion.ending is Ending.ABORTED else None
        return problem, Trajectory(
            problem_id=problem.problem_id,
            domain=problem.domain,
            group=attempt.group,
            attempt=attempt.number,
            turns=(turn,),
            ending=completion.ending,
            score=None,
            failure=aborted,
        )

    def _start_grading(self, items: list[tuple[Problem, Trajectory]], finished: Finished) -> list[asyncio.Task[None]]:
        """Those that have neither grade nor failure, shared out over the graders."""
        items = [item for item in items if item[1].score is None and item[1].failure is None]
        size = max(1, min(GRADED_AT_ONCE, -(-len(items) // len(self._graders))))
        parts = (items[start : start + size] for start in range(0, len(items), size))
        return [asyncio.create_task(self._grade(part, finished)) for part in parts]

    async def _grade(self, items: list[tuple[Problem, Trajectory]], finished: Finished) -> None:
        grader = self._graders[self._next_grader % len(self._graders)]
        self._next_grader += 1
        answers = await grader.grade(items)
        for (_, trajectory), answer in zip(items, answers, strict=True):
            if not isinstance(answer, RewardUnavailable):
                finished[trajectory.group, trajectory.attempt] = _graded(trajectory, answer)
        for answer in answers:
            if isinstance(answer, RewardUnavailable):
                raise answer


def _graded(trajectory: Trajectory, answer: Score | Failure) -> Trajectory:
    if isinstance(answer, Failure):
        return replace(trajectory, failure=answer)
    return replace(trajectory, score=answer)
