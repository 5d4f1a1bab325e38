"""Stream of problems on its way to batches: the event loop between the state machine (`lifecycle.py`) and the engines and
graders (`router.py`). It runs in the background until it is closed. The rollout scheduler has one stream for training and
opens another for each evaluation."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roll_core.config.rollout import InFlightPolicy
from roll_core.errors import RewardUnavailable, RoleDied, RollError
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.rollout.lifecycle import AttemptId, LedgerPage, Lifecycle, Phase
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
from roll_core.rollout.tracing import build_trace
from roll_core.types.manifest import DrawOutcome, Metrics
from roll_core.types.routing import merge_routing
from roll_core.types.trace import AttemptTrace
from roll_core.types.trajectory import Ending, Failure, Problem, Score, Trajectory, Turn

Finished = dict[AttemptId, Trajectory]
"""Trajectories that are generated to their end, graded or not, by attempt id. Their `group` is the problem's position in the
stream; the scheduler makes it relative to the batch's ledger page."""
Partial = dict[AttemptId, Completion]
"""Tokens so far of interrupted attempts, by attempt id."""
Keep = Callable[[Trajectory], None]
"""Receiver of finished trajectories, such as `Journal.add`."""
NO_ENGINE = ""
"""Engine name of an attempt that an earlier leg or stream finished."""
MAX_RETURNS_WITHOUT_PROGRESS = 16
"""Consecutive interruptions without a new token after which an attempt is given up as aborted."""
CLOSE_TIMEOUT_S = 10.0
"""Seconds that engines have to end their requests when the stream is closed."""

log = logging.getLogger(__name__)


def discard(trajectory: Trajectory) -> None:
    """Drop the trajectory: the `Keep` of streams whose trajectories are not journaled."""


@dataclass(frozen=True)
class Attempt:
    """Attempt to make: its problem, its id and the request for the engine."""

    problem: Problem
    attempt_id: AttemptId
    request: GenerationRequest
    failure: Failure | None = None
    """Reason why the problem cannot be posed; the request is then not sent. None for almost all problems."""


@dataclass(frozen=True)
class Batch:
    """Batch of finished trajectories, with its ledger page and the trace of every attempt of that page."""

    page: LedgerPage
    trajectories: list[Trajectory]
    """Trajectories to train on, in order of attempt id."""
    trace: list[AttemptTrace]


class Stream:
    """Driver of a lifecycle: reports events to it and does the work it asks for, in a background task."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        make_attempts: Callable[[Sequence[AttemptId]], list[Attempt]],
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
        """Difference to add to event-loop times to get seconds since 1970."""
        self.lifecycle = lifecycle
        self.router = router
        self.failures: list[BaseException] = []
        """Errors of this stream; the first is raised by `next_batch`."""
        self._make_attempts = make_attempts
        self._attempts: dict[AttemptId, Attempt] = {}
        self._attempt_id_of: dict[str, AttemptId] = {}
        """Attempt id by request id."""
        self._finished = finished
        self._partial = partial
        self._returns_without_progress: dict[AttemptId, int] = {}
        """Consecutive interruptions without a new token, by attempt id."""
        self._pool = pool
        self._events = events
        self._renderer = renderer
        self._keep = keep
        self._meters = meters
        self._progress = asyncio.Event()
        """Set after every round of events, and when the background task ends."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self._progress.set())

    # ---------------------------------------------------------------------------------------------- calls of the scheduler
    async def next_batch(self) -> Batch:
        """Wait for the next batch, and until engines have ended what it makes superfluous.

        A failure is raised only when no attempt is under way any more, so that the work of healthy engines is not lost.
        """
        await self._wait_until(lambda: self.lifecycle.is_full or self.lifecycle.is_settled)
        if not self.lifecycle.is_full:
            raise self.failures[0] if self.failures else RollError(self._too_few_message())
        page = self.lifecycle.take(self._now())
        self._dispatch()
        await self._wait_until(lambda: not self.lifecycle.is_aborting)
        lengths = {
            group.number: len(self._attempts[group.attempts[0].attempt_id].request.prompt_ids) for group in page.groups
        }
        trace = build_trace(page, lengths, self._finished, self._now(), self._epoch)
        batch = Batch(page, [self._finished[attempt_id] for attempt_id in page.consumed], trace)
        self._forget(page)
        return batch

    def read_meters(self) -> Metrics:
        """Return the metrics of the time since the last batch."""
        return self._meters.read(self._now())

    def adopted(self, version: int) -> None:
        """Report that every engine generates with this weights version."""
        self.lifecycle.adopted(version, self._now())
        self._dispatch()

    async def suspend(self, engines: Sequence[str], in_flight: InFlightPolicy) -> None:
        """Give these engines nothing more, and wait until they are idle: requests in flight finish or are interrupted."""
        ids = self.router.suspend(engines)
        if in_flight is not InFlightPolicy.FINISH:
            self.router.abort(ids)
        await self._wait_until(lambda: self.router.is_idle(engines))

    def resume(self, engines: Sequence[str]) -> None:
        """Give these engines requests again."""
        self.router.resume(engines)
        self._dispatch()

    def add_workers(self, engines: Sequence[EngineClient], graders: Sequence[GraderClient]) -> None:
        """Add new engines and graders, or successors of dead ones."""
        for engine in engines:
            self.router.add_engine(engine)
        for grader in graders:
            self._pool.add_grader(grader)
        self._dispatch()

    async def close(self) -> None:
        """Interrupt all requests and stop. An unresponsive engine is waited for at most `CLOSE_TIMEOUT_S`."""
        try:
            with contextlib.suppress(TimeoutError, RollError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.suspend(list(self.router.load), InFlightPolicy.RESUME)
        finally:
            self._task.cancel()
            self.router.cancel()
            self._pool.cancel()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; raise the error of the background task if that ends first."""
        while not condition():
            if self._task.done():
                self._task.result()
            self._progress.clear()
            await self._progress.wait()

    async def _run(self) -> None:
        """Handle events for ever. Events that arrive together are handled together, so that calls stay few."""
        self._dispatch()
        while True:
            self._handle(await self._events.get())
            while not self._events.empty():
                self._handle(self._events.get_nowait())
            self._dispatch()
            self._progress.set()

    # ---------------------------------------------------------------------------------------------- work to do
    def _dispatch(self) -> None:
        """Do all the work that the lifecycle asks for now."""
        while drawn := self.lifecycle.new_draws():
            for group in drawn:
                self._start_group(group)
        self._send_requests()
        if attempt_ids := self.lifecycle.to_grade(self._now()):
            self._send_to_graders(attempt_ids)
        if attempt_ids := self.lifecycle.to_abort():
            self.router.abort([self._attempts[attempt_id].request.request_id for attempt_id in attempt_ids])
        lifecycle = self.lifecycle
        self._meters.set(
            self.router.load_by_engine, lifecycle.num_queued, lifecycle.num_grading, lifecycle.num_accepted, self._now()
        )

    def _start_group(self, group: int) -> None:
        """Make the attempts of a group that was drawn. Attempts with a finished trajectory skip generation."""
        attempts = self._make_attempts(self.lifecycle.attempt_ids_of(group))
        for attempt in attempts:
            self._attempts[attempt.attempt_id] = attempt
            self._attempt_id_of[attempt.request.request_id] = attempt.attempt_id
        if attempts[0].failure is not None:
            self._refuse_group(group, attempts, attempts[0].failure)
            return
        for attempt_id in self.lifecycle.attempt_ids_of(group):
            known = self._finished.get(attempt_id)
            if known is not None and self.lifecycle.phase_of(attempt_id) is Phase.QUEUED:
                self.lifecycle.generating(attempt_id, NO_ENGINE, self._now())
                self._generated(attempt_id, known)

    def _refuse_group(self, group: int, attempts: Sequence[Attempt], failure: Failure) -> None:
        """Fail the attempts at a problem that cannot be posed, without a request."""
        log.warning("%s: no attempt is made", failure.cause)
        for attempt in attempts:
            nothing = Completion(attempt.request.request_id, (), (), (), Ending.UNPOSED)
            self._finished[attempt.attempt_id] = replace(self._as_trajectory(attempt, nothing), failure=failure)
        self.lifecycle.unposed(group, self._now())

    def _send_requests(self) -> None:
        """Assign queued attempts to engines until none has room. Without a living engine, fail them."""
        failure = self.router.no_survivors_error
        while (attempt_id := self.lifecycle.next_queued()) is not None:
            if failure is not None:
                self._fail(failure, [attempt_id])
                continue
            engine = self.router.assign(attempt_id[0], self._request(attempt_id))
            if engine is None:
                break
            self.lifecycle.generating(attempt_id, engine, self._now())
        self.router.send()

    def _request(self, attempt_id: AttemptId) -> GenerationRequest:
        """Request for a whole attempt, or for the rest of an interrupted one."""
        request, partial = self._attempts[attempt_id].request, self._partial.get(attempt_id)
        return request if partial is None else replace(request, prefix_ids=partial.token_ids)

    def _send_to_graders(self, attempt_ids: list[AttemptId]) -> None:
        if failure := self._pool.no_survivors_error:
            self._fail(failure, attempt_ids)
        else:
            self._pool.send([(self._attempts[attempt_id].problem, self._finished[attempt_id]) for attempt_id in attempt_ids])

    def _forget(self, page: LedgerPage) -> None:
        """Forget the attempts of a consumed page; late grades for them are ignored."""
        for group in page.groups:
            self.router.forget(group.number)
            for attempt in group.attempts:
                del self._attempt_id_of[self._attempts.pop(attempt.attempt_id).request.request_id]
                for kept in (self._finished, self._partial, self._returns_without_progress):
                    kept.pop(attempt.attempt_id, None)

    # ---------------------------------------------------------------------------------------------- events
    def _handle(self, event: RolloutEvent) -> None:
        match event:
            case Completed():
                for completion in event.completions:
                    self._completed(completion)
            case GenerationFailed():
                self._call_failed([self._attempt_id_of[request_id] for request_id in event.request_ids], event.error)
            case Graded():
                now = self._now()  # one time for the whole call: a trace thereby shows which attempts were graded together
                for item, grade in event.grades:
                    self._graded(item, grade, now)
            case GradingFailed():
                self._call_failed([_attempt_id(trajectory) for _, trajectory in event.items], event.error)

    def _completed(self, completion: Completion) -> None:
        attempt_id = self._attempt_id_of[completion.request_id]
        whole = _joined(self._partial.pop(attempt_id, None), completion)
        if self.lifecycle.phase_of(attempt_id) is Phase.ABORTING:
            self.lifecycle.generated(attempt_id, len(whole.token_ids), self._now())
        elif whole.ending is not Ending.ABORTED:
            self._finished[attempt_id] = self._as_trajectory(self._attempts[attempt_id], whole)
            self._keep(self._finished[attempt_id])
            self._generated(attempt_id, self._finished[attempt_id])
        else:
            self._interrupted(attempt_id, whole, num_new=len(completion.token_ids))

    def _interrupted(self, attempt_id: AttemptId, so_far: Completion, num_new: int) -> None:
        """Requeue an attempt to resume from its tokens, unless it has stopped making progress."""
        self._returns_without_progress[attempt_id] = 0 if num_new else self._returns_without_progress.get(attempt_id, 0) + 1
        if self._returns_without_progress[attempt_id] == MAX_RETURNS_WITHOUT_PROGRESS:
            self._finished[attempt_id] = self._as_trajectory(self._attempts[attempt_id], so_far)
            self._generated(attempt_id, self._finished[attempt_id])
            return
        self._partial[attempt_id] = so_far
        self.lifecycle.interrupted(attempt_id, len(so_far.token_ids), self._now())

    def _generated(self, attempt_id: AttemptId, trajectory: Trajectory) -> None:
        """Report a finished trajectory, with its grade if it has one."""
        self.lifecycle.generated(attempt_id, trajectory.num_completion_tokens, self._now())
        if trajectory.score is not None:
            self.lifecycle.graded(attempt_id, trajectory.score.value, self._now())
        elif trajectory.failure is not None:
            self.lifecycle.graded(attempt_id, None, self._now())

    def _graded(self, item: GradingItem, grade: Grade, now: float) -> None:
        """Report the grade of a trajectory, unless its group was decided meanwhile."""
        _, trajectory = item
        attempt_id = _attempt_id(trajectory)
        if not self.lifecycle.awaits_grade(attempt_id):
            return
        if isinstance(grade, RewardUnavailable):
            self._fail(grade, [attempt_id])
            return
        self._finished[attempt_id] = _with_grade(trajectory, grade)
        self._keep(self._finished[attempt_id])
        self.lifecycle.graded(attempt_id, grade.value if isinstance(grade, Score) else None, now)

    def _call_failed(self, attempt_ids: list[AttemptId], error: BaseException) -> None:
        """Requeue the attempts of a dead role for another one; any other error fails the stage."""
        if not isinstance(error, RoleDied):
            self._fail(error, attempt_ids)
            return
        for attempt_id in attempt_ids:
            self.lifecycle.lost(attempt_id, self._now())

    def _fail(self, error: BaseException, attempt_ids: list[AttemptId]) -> None:
        """Abandon these attempts; the stage fails with the first error."""
        self.failures.append(error)
        for attempt_id in attempt_ids:
            self.lifecycle.abandoned(attempt_id, self._now())

    def _too_few_message(self) -> str:
        """Error message of a stream that reached `max_draws` without a full batch."""
        lifecycle = self.lifecycle
        groups = lifecycle.pending_page.groups
        unposed = [f.cause for g in groups if (f := self._attempts[g.attempts[0].attempt_id].failure) is not None]
        outcomes = [group.outcome for group in groups]
        counted = {
            "left out by rollout.filter": outcomes.count(DrawOutcome.FILTERED),
            "could not be graded": outcomes.count(DrawOutcome.FAILED) - len(unposed),
            "could not be posed": len(unposed),
        }
        said = ", ".join(f"{count} {what}" for what, count in counted.items() if count)
        advice = (
            f"the first was {unposed[0]}: make these prompts shorter, or make room for them"
            if 2 * len(unposed) > len(groups)
            else "make the filter milder, raise max_draws, or choose problems that the policy solves sometimes"
        )
        return (
            f"rollout.max_draws: of {len(groups)} problems drawn only {lifecycle.num_accepted} were useful, and "
            f"{lifecycle.spec.num_groups} are needed ({said}): {advice}"
        )

    def _as_trajectory(self, attempt: Attempt, completion: Completion) -> Trajectory:
        turn = Turn(
            prompt_ids=attempt.request.prompt_ids,
            completion_ids=completion.token_ids,
            sampler_logprobs=completion.sampler_logprobs,
            weights_versions=completion.weights_versions,
            text=self._renderer.text(completion.token_ids),
            experts=completion.experts,
        )
        group, number = attempt.attempt_id
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


def _attempt_id(trajectory: Trajectory) -> AttemptId:
    return trajectory.group, trajectory.attempt


def _joined(partial: Completion | None, rest: Completion) -> Completion:
    """Concatenate the tokens of an interrupted completion and its continuation."""
    if partial is None:
        return rest
    return Completion(
        request_id=rest.request_id,
        token_ids=partial.token_ids + rest.token_ids,
        sampler_logprobs=partial.sampler_logprobs + rest.sampler_logprobs,
        weights_versions=partial.weights_versions + rest.weights_versions,
        ending=rest.ending,
        experts=merge_routing(partial.experts, rest.experts),
    )


def _with_grade(trajectory: Trajectory, grade: Score | Failure) -> Trajectory:
    """Copy of a trajectory with its score or failure."""
    if isinstance(grade, Failure):
        return replace(trajectory, failure=grade)
    return replace(trajectory, score=grade)
