r"""State machine of every attempt at every problem of a stream: events go in, work to do comes out.

    queued -> generating -> generated -> grading -> graded | failed      its group: accepted | filtered | failed -> trained
      ^ \________|_______________________________ aborted (by way of aborting, while an engine has it)
      |__________|  lost with an engine, or interrupted: it resumes from the tokens it has
    queued -> failed  its problem cannot be posed: the prompt is too long, or cannot be rendered

The state machine performs no calls, does not wait and reads no clock. Its driver (`stream.py`, the tests) reports each event
and its time. Every step costs the same however many attempts are in flight. A group is judged the moment it is complete. A
rejected group is replaced at once by the next problem.

**Pacing.** The batch after the one that trains weights version c trains version c + 1. At weights version v, with the batch
for version c to be taken next, the stream holds at most the groups of the batches for versions c to v, plus `ahead` batches.
That lead shrinks while finished batches wait to be taken (`lookahead.py`). A group is therefore consumed before it is more
than ceil(ahead) versions old, and no group has to be discarded for its age. With `ahead` 0 a group is drawn only once its
batch can be trained: the synchronous loop.

**Order.** A batch consists of accepted groups in stream order. It is full when enough groups are accepted and every group
before them is decided. What is trained on therefore does not depend on what finishes first, and a long completion has the
same chance as a short one. Redundant groups change this: the first groups to finish win. A batch is then full as soon as
enough groups are accepted, wherever they are in the stream, and groups that are undecided or too old are aborted. This
favours short completions; the metrics show by how much (`metrics.page_metrics`).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from roll_core.rollout.lookahead import Lookahead
from roll_core.types.manifest import DrawOutcome
from roll_core.types.trace import Span
from roll_core.types.trajectory import GREEDY_ATTEMPT

AttemptId = tuple[int, int]
"""Identity of an attempt: (position of its problem in the stream, number of the attempt in its group)."""
IsUseful = Callable[[Sequence[float]], bool]
"""Predicate on the rewards of a group (at least one): True if the group is to be trained on."""


class Phase(StrEnum):
    """Phase of an attempt."""

    QUEUED = "queued"
    GENERATING = "generating"
    GENERATED = "generated"
    """Generation is complete; the attempt waits for a grader."""
    GRADING = "grading"
    GRADED = "graded"
    FAILED = "failed"
    """Finished without a grade."""
    ABORTING = "aborting"
    """Abort requested, but the engine has not returned the attempt yet."""
    ABORTED = "aborted"
    ABANDONED = "abandoned"
    """Left unfinished because the stage is going to fail."""


NEXT = {
    Phase.QUEUED: {Phase.GENERATING, Phase.FAILED, Phase.ABORTED, Phase.ABANDONED},
    Phase.GENERATING: {Phase.GENERATED, Phase.QUEUED, Phase.ABORTING, Phase.ABANDONED},
    Phase.GENERATED: {Phase.GRADING, Phase.GRADED, Phase.FAILED, Phase.ABORTED, Phase.ABANDONED},
    Phase.GRADING: {Phase.GRADED, Phase.FAILED, Phase.GENERATED, Phase.ABORTED, Phase.ABANDONED},
    Phase.GRADED: set(),
    Phase.FAILED: set(),
    Phase.ABORTING: {Phase.ABORTED},
    Phase.ABORTED: set(),
    Phase.ABANDONED: set(),
}
"""Legal transitions. An attempt returns to queued or generated if its engine or grader died, or if it was interrupted."""
ENDED = frozenset(phase for phase, following in NEXT.items() if not following)
"""Final phases: no transition leaves them."""


@dataclass(frozen=True)
class StreamSpec:
    """Parameters of a stream: batch shape, lookahead, redundancy and group filter.

    Example: StreamSpec(num_groups=32, group_size=8, num_batches=100, ahead=2.0, is_useful=lambda rewards: any(rewards))
    """

    num_groups: int
    """Accepted groups in a batch."""
    group_size: int
    """Graded attempts that complete a group."""
    num_batches: int = 1
    """Number of batches; nothing is drawn beyond them."""
    ahead: float = 0.0
    """Maximum lookahead, in batches beyond the next one; 0 is synchronous."""
    greedy_baseline: bool = False
    """True adds one greedy attempt to each group; the group is incomplete without it."""
    redundant_groups: int = 0
    """Groups drawn beyond those needed; the first to finish win."""
    redundant_attempts: int = 0
    """Attempts of each group beyond `group_size`; the first to finish win."""
    max_draws: int | None = None
    """Maximum problems drawn for one batch, beside those drawn ahead; None is unlimited."""
    is_useful: IsUseful | None = None
    """Group filter. None accepts every group, also one without a single grade."""
    replaces_unposed: bool = True
    """True replaces a group whose problem cannot be posed by the next problem. False accepts it, with failed attempts: an
    evaluation has no other problems."""

    @property
    def max_staleness(self) -> int:
        """Maximum age of a trained token, in weights versions."""
        return math.ceil(self.ahead)


@dataclass(slots=True)
class AttemptState:
    """State of one attempt: its phase, history, tokens and engine."""

    attempt_id: AttemptId
    phase: Phase
    history: list[tuple[Phase, float]]
    """Every phase entered so far, with the time of entry in seconds."""
    num_tokens: int = 0
    """Tokens generated so far; an interrupted attempt resumes after them."""
    spans: list[Span] = field(default_factory=list)
    """Completed visits to engines."""
    engine: str = ""
    """Engine that has the attempt, or had it last."""


@dataclass(slots=True)
class GroupState:
    """State of one group: the attempts at one problem and what became of them."""

    number: int
    """Position of the problem in the stream."""
    version: int
    """Weights version when the group was drawn; none of its tokens is older."""
    drawn_at: float
    outcome: DrawOutcome | None = None
    """None while the group is undecided; TRAINED once it is accepted."""
    attempts: list[AttemptState] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    """Reward by attempt number, without the greedy attempt's."""
    num_failed: int = 0
    awaits_greedy: bool = False
    """True until the greedy attempt is graded or failed."""

    @property
    def consumed(self) -> list[AttemptState]:
        """Attempts that become part of the batch if this group does."""
        return [attempt for attempt in self.attempts if attempt.phase in (Phase.GRADED, Phase.FAILED)]


@dataclass(frozen=True)
class LedgerPage:
    """Ledger entry of one batch: every group from the end of the batch before it up to its own end."""

    first: int
    """Position of the first group in the stream."""
    groups: tuple[GroupState, ...]

    @property
    def outcomes(self) -> str:
        """Outcome of every draw, one letter each (as in `Draws`)."""
        return "".join(group.outcome.letter for group in self.groups if group.outcome is not None)

    @property
    def consumed(self) -> list[AttemptId]:
        """Ids of the attempts in the batch, sorted."""
        accepted = (group for group in self.groups if group.outcome is DrawOutcome.TRAINED)
        return sorted(attempt.attempt_id for group in accepted for attempt in group.consumed)


class Lifecycle:
    """State machine of the attempts and groups of one stream.

    Example: a group of one attempt, from its draw to a batch.

        lifecycle = Lifecycle(StreamSpec(num_groups=1, group_size=1), first=7, version=0, now=0.0)
        lifecycle.new_draws()                        # [7]
        lifecycle.next_queued()                      # (7, 0)
        lifecycle.generating((7, 0), "engine 0", now=0.1)
        lifecycle.generated((7, 0), num_tokens=5, now=0.9)
        lifecycle.to_grade(now=0.9)                  # [(7, 0)]
        lifecycle.graded((7, 0), reward=1.0, now=1.0)
        lifecycle.is_full                            # True
        lifecycle.take(now=1.0).outcomes             # "t"
    """

    def __init__(self, spec: StreamSpec, first: int, version: int, now: float):
        self.spec = spec
        self._version = version
        self._next_version = version
        self._batches_left = spec.num_batches
        self._lookahead = Lookahead(spec.ahead)
        self._cursor = first
        self._next_draw = first
        self._groups: dict[int, GroupState] = {}
        """Groups that no batch has consumed, by number, in stream order."""
        self._attempts: dict[AttemptId, AttemptState] = {}
        self._num_live = 0
        """Groups that are undecided or accepted."""
        self._num_accepted = 0
        self._decided_until = first
        """First undecided group: every group before it is decided."""
        self._num_accepted_in_order = 0
        """Accepted groups before `_decided_until`."""
        self._num_under_way = 0
        """Attempts that are not in a final phase."""
        self._counts = dict.fromkeys(Phase, 0)
        self._stopped = False
        self._new_draws: list[int] = []
        self._queue: deque[AttemptState] = deque()
        self._to_grade: deque[AttemptState] = deque()
        self._to_abort: list[AttemptId] = []
        self._draw(now)

    # ---------------------------------------------------------------------------------------------- work to do
    def new_draws(self) -> list[int]:
        """Return the groups drawn since the last call."""
        drawn, self._new_draws = self._new_draws, []
        return drawn

    def next_queued(self) -> AttemptId | None:
        """Return the attempt to generate next; the same one until `generating` is reported for it."""
        while self._queue and self._queue[0].phase is not Phase.QUEUED:
            self._queue.popleft()
        return self._queue[0].attempt_id if self._queue else None

    def to_grade(self, now: float) -> list[AttemptId]:
        """Return the attempts that wait for a grader and move them to GRADING."""
        waiting = [attempt for attempt in self._to_grade if attempt.phase is Phase.GENERATED]
        self._to_grade.clear()
        for attempt in waiting:
            self._move(attempt, Phase.GRADING, now)
        return [attempt.attempt_id for attempt in waiting]

    def to_abort(self) -> list[AttemptId]:
        """Return attempts that engines should abort, each once. Their engines still return them, with the tokens so far."""
        attempt_ids, self._to_abort = self._to_abort, []
        return attempt_ids

    @property
    def is_full(self) -> bool:
        """True if the next batch can be taken."""
        accepted = self._num_accepted if self.spec.redundant_groups else self._num_accepted_in_order
        return accepted >= self.spec.num_groups

    @property
    def is_settled(self) -> bool:
        """True if no attempt is under way. If no batch is full either, none will become full."""
        return not self._num_under_way

    @property
    def is_aborting(self) -> bool:
        """True if an engine has not yet returned an attempt it was told to abort."""
        return self._counts[Phase.ABORTING] > 0

    # ---------------------------------------------------------------------------------------------- events
    def adopted(self, version: int, now: float) -> None:
        """Report that every engine generates with this weights version from now on."""
        assert version >= self._version, f"weights version {version} comes after {self._version}"
        self._version = version
        self._draw(now)

    def take(self, now: float) -> LedgerPage:
        """Take the next batch and return its ledger page.

        The page includes, as aborted, undecided groups before the end of the batch and groups too old for a later batch.
        """
        assert self.is_full, "no batch is full"
        accepted = (group for group in self._groups.values() if group.outcome is DrawOutcome.TRAINED)
        last = [next(accepted) for _ in range(self.spec.num_groups)][-1].number
        self._next_version += 1
        self._batches_left -= 1
        oldest = self._next_version - self.spec.max_staleness
        for group in self._groups.values():
            if (group.number > last or group.outcome is None) and self._is_live(group):
                if group.number > last and group.version >= oldest and self._batches_left:
                    break  # versions never decrease along the stream: every later group is as young
                self._abandon_group(group, now)
                last = max(last, group.number)
        page = LedgerPage(self._cursor, tuple(self._groups.pop(number) for number in range(self._cursor, last + 1)))
        self._forget_page(page)
        self._lookahead.batch_taken(now, self.is_full)
        self._draw(now)
        return page

    def generating(self, attempt_id: AttemptId, engine: str, now: float) -> None:
        """Report that an engine has the attempt."""
        attempt = self._attempts[attempt_id]
        attempt.engine = engine
        self._move(attempt, Phase.GENERATING, now)

    def generated(self, attempt_id: AttemptId, num_tokens: int, now: float) -> None:
        """Report that an engine completed the attempt, or ended it on request. `num_tokens` counts all its tokens."""
        attempt = self._returned_by_engine(attempt_id, num_tokens, now)
        if attempt is not None:
            self._move(attempt, Phase.GENERATED, now)
            self._to_grade.append(attempt)

    def interrupted(self, attempt_id: AttemptId, num_tokens: int, now: float) -> None:
        """Report that an engine returned the attempt unfinished, with `num_tokens` so far; it is requeued at the front."""
        attempt = self._returned_by_engine(attempt_id, num_tokens, now)
        if attempt is not None:
            self._move(attempt, Phase.QUEUED, now)
            self._queue.appendleft(attempt)

    def unposed(self, number: int, now: float) -> None:
        """Report that the problem of a group cannot be posed: its attempts, all still queued, fail."""
        group = self._groups[number]
        for attempt in group.attempts:
            self._move(attempt, Phase.FAILED, now)
        self._decide(group, DrawOutcome.FAILED if self.spec.replaces_unposed else DrawOutcome.TRAINED, now)

    def graded(self, attempt_id: AttemptId, reward: float | None, now: float) -> None:
        """Report a grade, or None if grading failed for good. Ignored if the group was decided before."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.phase is Phase.ABORTED:
            return
        self._move(attempt, Phase.FAILED if reward is None else Phase.GRADED, now)
        group, number = self._groups[attempt_id[0]], attempt_id[1]
        if number == GREEDY_ATTEMPT:
            group.awaits_greedy = False
        elif reward is None:
            group.num_failed += 1
        else:
            group.rewards[number] = reward
        self._close_if_complete(group, now)

    def lost(self, attempt_id: AttemptId, now: float) -> None:
        """Report that the engine or grader of the attempt died; the attempt waits for another one."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.phase is Phase.ABORTED:
            return  # the group was decided before the grader died: the grade is not needed
        if attempt.phase in (Phase.GENERATING, Phase.ABORTING):
            self._leave_engine(attempt, attempt.num_tokens, now)
        match attempt.phase:
            case Phase.GRADING:
                self._move(attempt, Phase.GENERATED, now)
                self._to_grade.append(attempt)
            case Phase.ABORTING:
                self._move(attempt, Phase.ABORTED, now)
            case _:
                self._move(attempt, Phase.QUEUED, now)
                self._queue.append(attempt)

    def abandoned(self, attempt_id: AttemptId, now: float) -> None:
        """Report that the attempt cannot be finished. Nothing more is drawn; the stage fails once no attempt is under
        way."""
        self._stopped = True
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.phase is Phase.ABORTED:
            return
        if attempt.phase in (Phase.GENERATING, Phase.ABORTING):
            self._leave_engine(attempt, attempt.num_tokens, now)
        self._move(attempt, Phase.ABORTED if attempt.phase is Phase.ABORTING else Phase.ABANDONED, now)

    # ---------------------------------------------------------------------------------------------- queries
    def phase_of(self, attempt_id: AttemptId) -> Phase:
        """Phase of an attempt of a group that no batch has consumed."""
        return self._attempts[attempt_id].phase

    def attempt_ids_of(self, group: int) -> list[AttemptId]:
        """Ids of the attempts of a group."""
        return [attempt.attempt_id for attempt in self._groups[group].attempts]

    def awaits_grade(self, attempt_id: AttemptId) -> bool:
        """True if a grader has the attempt and its grade still matters."""
        attempt = self._attempts.get(attempt_id)
        return attempt is not None and attempt.phase is Phase.GRADING

    @property
    def num_attempts(self) -> int:
        """Number of attempts of groups that no batch has consumed."""
        return sum(len(group.attempts) for group in self._groups.values())

    @property
    def num_accepted(self) -> int:
        """Number of accepted groups that wait to be trained on."""
        return self._num_accepted

    @property
    def num_queued(self) -> int:
        return self._counts[Phase.QUEUED]

    @property
    def num_grading(self) -> int:
        return self._counts[Phase.GRADING]

    @property
    def pending_page(self) -> LedgerPage:
        """Page of all groups that no batch has consumed, undecided ones included."""
        return LedgerPage(self._cursor, tuple(self._groups.values()))

    @property
    def position(self) -> tuple[int, int]:
        """First problem of the next batch, and the weights version that the batch trains."""
        return self._cursor, self._next_version

    # ---------------------------------------------------------------------------------------------- transitions
    @property
    def _max_live(self) -> int:
        """Maximum number of groups that may be undecided or accepted now."""
        spec = self.spec
        batches = self._version - self._next_version + 1 + self._lookahead.lead
        room = min(math.floor(batches * spec.num_groups), self._batches_left * spec.num_groups)
        return room + spec.redundant_groups if room > 0 else 0

    @property
    def _draw_limit(self) -> float:
        """First problem that may not be drawn now, by `max_draws`."""
        spec = self.spec
        if spec.max_draws is None:
            return math.inf
        return self._cursor + spec.max_draws + math.floor(spec.ahead * spec.num_groups)

    def _draw(self, now: float) -> None:
        while not self._stopped and self._num_live < self._max_live and self._next_draw < self._draw_limit:
            group = GroupState(self._next_draw, self._version, now, awaits_greedy=self.spec.greedy_baseline)
            numbers = list(range(self.spec.group_size + self.spec.redundant_attempts))
            for number in [GREEDY_ATTEMPT, *numbers] if self.spec.greedy_baseline else numbers:
                attempt = AttemptState((group.number, number), Phase.QUEUED, [(Phase.QUEUED, now)])
                group.attempts.append(attempt)
                self._attempts[attempt.attempt_id] = attempt
                self._queue.append(attempt)
            self._num_under_way += len(group.attempts)
            self._counts[Phase.QUEUED] += len(group.attempts)
            self._num_live += 1
            self._groups[group.number] = group
            self._new_draws.append(group.number)
            self._next_draw += 1

    def _move(self, attempt: AttemptState, phase: Phase, now: float) -> None:
        assert phase in NEXT[attempt.phase], f"attempt {attempt.attempt_id} is {attempt.phase} and cannot become {phase}"
        self._num_under_way -= phase in ENDED
        self._counts[attempt.phase] -= 1
        self._counts[phase] += 1
        attempt.phase = phase
        attempt.history.append((phase, now))
        if phase is Phase.ABORTED and attempt.attempt_id[0] < self._cursor:
            del self._attempts[attempt.attempt_id]

    def _returned_by_engine(self, attempt_id: AttemptId, num_tokens: int, now: float) -> AttemptState | None:
        """Close the span of an attempt that its engine returned; None if it was being aborted."""
        attempt = self._attempts[attempt_id]
        self._leave_engine(attempt, num_tokens, now)
        if attempt.phase is not Phase.ABORTING:
            return attempt
        self._move(attempt, Phase.ABORTED, now)
        return None

    def _leave_engine(self, attempt: AttemptState, num_tokens: int, now: float) -> None:
        since = next(at for phase, at in reversed(attempt.history) if phase is Phase.GENERATING)
        attempt.spans.append(Span(attempt.engine, since, now, num_tokens - attempt.num_tokens))
        attempt.num_tokens = num_tokens

    def _close_if_complete(self, group: GroupState, now: float) -> None:
        """Judge a group that has enough grades, or no attempt left that could get one, and its greedy baseline."""
        wanted, made = self.spec.group_size, self.spec.group_size + self.spec.redundant_attempts
        if len(group.rewards) < wanted and len(group.rewards) + group.num_failed < made:
            return
        for attempt in group.attempts if self.spec.redundant_attempts else ():
            if attempt.attempt_id[1] != GREEDY_ATTEMPT:
                self._abort(attempt, now)
        if not group.awaits_greedy:
            self._decide(group, self._judge(group), now)

    def _decide(self, group: GroupState, outcome: DrawOutcome, now: float) -> None:
        """Close a group, and draw what its outcome makes room for."""
        self._close(group, outcome)
        if self.is_full:
            self._lookahead.batch_ready(now)
        self._draw(now)

    def _judge(self, group: GroupState) -> DrawOutcome:
        """Outcome by rewards in attempt order, so that floating-point sums do not depend on which attempt finished first."""
        if self.spec.is_useful is None:
            return DrawOutcome.TRAINED
        if not group.rewards:
            return DrawOutcome.FAILED
        rewards = [group.rewards[number] for number in sorted(group.rewards)]
        return DrawOutcome.TRAINED if self.spec.is_useful(rewards) else DrawOutcome.FILTERED

    def _close(self, group: GroupState, outcome: DrawOutcome) -> None:
        group.outcome = outcome
        if outcome is DrawOutcome.TRAINED:
            self._num_accepted += 1
        else:
            self._num_live -= 1
        self._advance_decided_prefix()

    def _advance_decided_prefix(self) -> None:
        """Move `_decided_until` past the groups that are decided."""
        while (group := self._groups.get(self._decided_until)) is not None and group.outcome is not None:
            self._num_accepted_in_order += group.outcome is DrawOutcome.TRAINED
            self._decided_until += 1

    def _is_live(self, group: GroupState) -> bool:
        """True if the group is undecided or accepted."""
        return group.outcome in (None, DrawOutcome.TRAINED)

    def _abandon_group(self, group: GroupState, now: float) -> None:
        """Abort a group that no batch is going to consume."""
        self._num_live -= 1
        self._num_accepted -= group.outcome is DrawOutcome.TRAINED
        group.outcome = DrawOutcome.ABORTED
        for attempt in group.attempts:
            self._abort(attempt, now)

    def _forget_page(self, page: LedgerPage) -> None:
        """Forget what a batch consumed, except attempts that engines still have."""
        self._cursor = page.first + len(page.groups)
        self._num_live -= self.spec.num_groups
        self._num_accepted -= self.spec.num_groups
        for group in page.groups:
            for attempt in group.attempts:
                if attempt.phase is not Phase.ABORTING:
                    del self._attempts[attempt.attempt_id]
        self._decided_until = self._cursor
        self._num_accepted_in_order = 0
        self._advance_decided_prefix()

    def _abort(self, attempt: AttemptState, now: float) -> None:
        match attempt.phase:
            case Phase.GENERATING:
                self._move(attempt, Phase.ABORTING, now)
                self._to_abort.append(attempt.attempt_id)
            case Phase.QUEUED | Phase.GENERATED | Phase.GRADING:
                self._move(attempt, Phase.ABORTED, now)
            case _:
                pass
