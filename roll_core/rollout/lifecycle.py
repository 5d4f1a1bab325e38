r"""What may become of every attempt at every problem of a stream, as a state machine: what happened goes in, what is to be
done comes out.

    queued -> generating -> generated -> grading -> graded | failed      its group: accepted | filtered | failed -> trained
      ^ \________|_______________________________ aborted (by way of aborting, while an engine has it)
      |__________|  lost with an engine, or interrupted: it goes on from the tokens it has

It calls nobody, waits for nobody and reads no clock: whoever drives it (`scheduler.py`, the tests, a simulation) says what
happened and when. Every step costs the same however many attempts are in flight. A group is judged the moment it is
complete, and one that is left out is replaced at once by the next problem.

**Pacing.** A batch trains some weights version; the next one trains the version after that. At version v, with the batch for
version c to be taken next, so many groups may be open or accepted as make up the batches of versions c to v, and up to
`ahead` batches more: fewer, while batches lie finished before they are taken (`pacing.py`). Whatever is drawn is therefore
consumed before it is more than ceil(ahead) versions old, and nothing has to be thrown away for its age. With `ahead` 0
nothing is drawn before the batch it belongs to can be: the synchronous loop.

**Order.** Batches are made of the accepted groups in the order of the stream. A batch is full when enough are accepted and
none before them is undecided, so that what is trained on does not depend on what finishes first, and a long completion has
the chance of a short one. With redundant groups the first to finish win instead: a batch is full when enough are accepted
wherever they stand, and those that are undecided or too old by then are aborted. That leans towards what is quick, and the
metrics show by how much.
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

Place = tuple[int, int]
"""An attempt by its problem's place in the stream and its number there."""
IsUseful = Callable[[Sequence[float]], bool]
"""Whether a group with these rewards is to be trained on; there is at least one."""


class Phase(StrEnum):
    QUEUED = "queued"
    GENERATING = "generating"
    GENERATED = "generated"
    """Waits for a grader."""
    GRADING = "grading"
    GRADED = "graded"
    FAILED = "failed"
    """Ended without a grade."""
    ABORTING = "aborting"
    """Not needed any more, and still with an engine."""
    ABORTED = "aborted"
    ABANDONED = "abandoned"
    """Cannot be finished now: the stage is going to fail."""


NEXT = {
    Phase.QUEUED: {Phase.GENERATING, Phase.ABORTED, Phase.ABANDONED},
    Phase.GENERATING: {Phase.GENERATED, Phase.QUEUED, Phase.ABORTING, Phase.ABANDONED},
    Phase.GENERATED: {Phase.GRADING, Phase.GRADED, Phase.FAILED, Phase.ABORTED, Phase.ABANDONED},
    Phase.GRADING: {Phase.GRADED, Phase.FAILED, Phase.GENERATED, Phase.ABORTED, Phase.ABANDONED},
    Phase.GRADED: set(),
    Phase.FAILED: set(),
    Phase.ABORTING: {Phase.ABORTED},
    Phase.ABORTED: set(),
    Phase.ABANDONED: set(),
}
"""What may follow what. Back to queued or generated goes what was lost with an engine or a grader, or interrupted."""
ENDED = frozenset(state for state, following in NEXT.items() if not following)


@dataclass(frozen=True)
class StreamSpec:
    """What is asked of a stream.

    Example: StreamSpec(num_groups=32, group_size=8, num_batches=100, ahead=2.0, is_useful=lambda rewards: any(rewards))
    """

    num_groups: int
    """Accepted groups in a batch."""
    group_size: int
    num_batches: int = 1
    """Nothing is drawn for more than these."""
    ahead: float = 0.0
    """Most batches that may be under way beyond the one that is waited for."""
    greedy_baseline: bool = False
    """One attempt more in each group, that it cannot do without."""
    redundant_groups: int = 0
    redundant_attempts: int = 0
    max_draws: int | None = None
    """Most problems that a batch may use up, beside those that are drawn ahead."""
    is_useful: IsUseful | None = None
    """None takes every group as it comes, one that nobody could grade included."""

    @property
    def max_staleness(self) -> int:
        return math.ceil(self.ahead)


@dataclass(slots=True)
class AttemptState:
    place: Place
    state: Phase
    history: list[tuple[Phase, float]]
    """Every state it was in, with the time it came there."""
    num_tokens: int = 0
    """That it has, and need not generate again."""
    spans: list[Span] = field(default_factory=list)
    engine: str = ""
    """That has it, or had it last."""


@dataclass(slots=True)
class GroupState:
    number: int
    version: int
    """Of the weights when it was drawn: no token of it is older."""
    drawn_at: float
    outcome: DrawOutcome | None = None
    """None while it is open; TRAINED are those that are accepted."""
    attempts: list[AttemptState] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    """By attempt, without the greedy one's."""
    num_failed: int = 0
    awaits_greedy: bool = False

    @property
    def consumed(self) -> list[AttemptState]:
        """Attempts that are trained on, if this group is."""
        return [life for life in self.attempts if life.state in (Phase.GRADED, Phase.FAILED)]


@dataclass(frozen=True)
class Page:
    """What a batch used up of the stream: every group from where the batch before it ended."""

    first: int
    groups: tuple[GroupState, ...]

    @property
    def outcomes(self) -> str:
        """What became of every draw, a letter each (as in `Draws`)."""
        return "".join(group.outcome.letter for group in self.groups if group.outcome is not None)

    @property
    def consumed(self) -> list[Place]:
        """The attempts of the batch, in order."""
        accepted = (group for group in self.groups if group.outcome is DrawOutcome.TRAINED)
        return sorted(life.place for group in accepted for life in group.consumed)


class Lifecycle:
    """Example: a group of one attempt, from its draw to a batch.

    life = Lifecycle(StreamSpec(num_groups=1, group_size=1), first=7, version=0, now=0.0)
    life.new_draws()                        # [7]
    life.next_queued()                      # (7, 0)
    life.generating((7, 0), "engine 0", now=0.1)
    life.generated((7, 0), num_tokens=5, now=0.9)
    life.to_grade(now=0.9)                  # [(7, 0)]
    life.graded((7, 0), reward=1.0, now=1.0)
    life.is_full                            # True
    life.take(now=1.0).outcomes             # "t"
    """

    def __init__(self, terms: StreamSpec, first: int, version: int, now: float):
        self.terms = terms
        self._version = version
        self._next_version = version
        self._batches_left = terms.num_batches
        self._pace = Lookahead(terms.ahead)
        self._cursor = first
        self._next_draw = first
        self._groups: dict[int, GroupState] = {}
        """Drawn since the last batch ended, by number, in order."""
        self._attempts: dict[Place, AttemptState] = {}
        self._num_live = 0
        self._num_accepted = 0
        self._decided_until = first
        """Every group before this one is decided."""
        self._num_accepted_in_order = 0
        """Accepted groups before that one."""
        self._num_under_way = 0
        self._counts = dict.fromkeys(Phase, 0)
        self._stopped = False
        self._new_draws: list[int] = []
        self._queue: deque[AttemptState] = deque()
        self._to_grade: deque[AttemptState] = deque()
        self._to_abort: list[Place] = []
        self._draw(now)

    # ---------------------------------------------------------------------------------------------- what is to be done
    def new_draws(self) -> list[int]:
        """Groups drawn since this was last asked."""
        drawn, self._new_draws = self._new_draws, []
        return drawn

    def next_queued(self) -> Place | None:
        """The attempt to generate next, until `generating` says that it is."""
        while self._queue and self._queue[0].state is not Phase.QUEUED:
            self._queue.popleft()
        return self._queue[0].place if self._queue else None

    def to_grade(self, now: float) -> list[Place]:
        """Attempts that wait for a grader, which from now on has them."""
        waiting = [life for life in self._to_grade if life.state is Phase.GENERATED]
        self._to_grade.clear()
        for life in waiting:
            self._move(life, Phase.GRADING, now)
        return [life.place for life in waiting]

    def to_abort(self) -> list[Place]:
        """Attempts that engines need not go on with, each told once. They still come back, with what they have."""
        places, self._to_abort = self._to_abort, []
        return places

    @property
    def is_full(self) -> bool:
        """Whether the next batch can be taken."""
        accepted = self._num_accepted if self.terms.redundant_groups else self._num_accepted_in_order
        return accepted >= self.terms.num_groups

    @property
    def is_settled(self) -> bool:
        """Nothing is under way. If no batch is full either, none will be."""
        return not self._num_under_way

    @property
    def is_aborting(self) -> bool:
        """Engines still have something they were told to end."""
        return self._counts[Phase.ABORTING] > 0

    # ---------------------------------------------------------------------------------------------- what happened
    def adopted(self, version: int, now: float) -> None:
        """Whatever is generated from now on is by these weights."""
        assert version >= self._version, f"weights version {version} comes after {self._version}"
        self._version = version
        self._draw(now)

    def take(self, now: float) -> Page:
        """The next batch, which is trained on. What cannot become part of a later one, for its age, ends here, too."""
        assert self.is_full, "no batch is full"
        accepted = (group for group in self._groups.values() if group.outcome is DrawOutcome.TRAINED)
        last = [next(accepted) for _ in range(self.terms.num_groups)][-1].number
        self._next_version += 1
        self._batches_left -= 1
        oldest = self._next_version - self.terms.max_staleness
        for group in self._groups.values():
            if (group.number > last or group.outcome is None) and self._is_live(group):
                if group.number > last and group.version >= oldest and self._batches_left:
                    break  # versions grow along the stream: all that follow are as young
                self._give_up(group, now)
                last = max(last, group.number)
        page = Page(self._cursor, tuple(self._groups.pop(number) for number in range(self._cursor, last + 1)))
        self._leave_behind(page)
        self._pace.taken(now, self.is_full)
        self._draw(now)
        return page

    def generating(self, place: Place, engine: str, now: float) -> None:
        life = self._attempts[place]
        life.engine = engine
        self._move(life, Phase.GENERATING, now)

    def generated(self, place: Place, num_tokens: int, now: float) -> None:
        """An engine is done with it: to its end, or because it was told to abort. It has so many tokens now."""
        life = self._given_back(place, num_tokens, now)
        if life is not None:
            self._move(life, Phase.GENERATED, now)
            self._to_grade.append(life)

    def interrupted(self, place: Place, num_tokens: int, now: float) -> None:
        """An engine gave it back before its end, with so many tokens: it is next to go on."""
        life = self._given_back(place, num_tokens, now)
        if life is not None:
            self._move(life, Phase.QUEUED, now)
            self._queue.appendleft(life)

    def graded(self, place: Place, reward: float | None, now: float) -> None:
        """It has a grade, or (None) is known to get none. Too late for one whose group was decided: that says nothing."""
        life = self._attempts.get(place)
        if life is None or life.state is Phase.ABORTED:
            return
        self._move(life, Phase.FAILED if reward is None else Phase.GRADED, now)
        group, number = self._groups[place[0]], place[1]
        if number == GREEDY_ATTEMPT:
            group.awaits_greedy = False
        elif reward is None:
            group.num_failed += 1
        else:
            group.rewards[number] = reward
        self._look_at(group, now)

    def lost(self, place: Place, now: float) -> None:
        """The engine or grader that had it is no more: it waits for another one."""
        life = self._attempts.get(place)
        if life is None or life.state is Phase.ABORTED:
            return  # by the time its grader died nobody wanted its grade
        if life.state in (Phase.GENERATING, Phase.ABORTING):
            self._leave_engine(life, life.num_tokens, now)
        match life.state:
            case Phase.GRADING:
                self._move(life, Phase.GENERATED, now)
                self._to_grade.append(life)
            case Phase.ABORTING:
                self._move(life, Phase.ABORTED, now)
            case _:
                self._move(life, Phase.QUEUED, now)
                self._queue.append(life)

    def abandoned(self, place: Place, now: float) -> None:
        """It cannot be finished now, and the stage therefore fails: nothing more is drawn, what is under way goes on."""
        self._stopped = True
        life = self._attempts.get(place)
        if life is None or life.state is Phase.ABORTED:
            return
        if life.state in (Phase.GENERATING, Phase.ABORTING):
            self._leave_engine(life, life.num_tokens, now)
        self._move(life, Phase.ABORTED if life.state is Phase.ABORTING else Phase.ABANDONED, now)

    # ---------------------------------------------------------------------------------------------- how things stand
    def state_of(self, place: Place) -> Phase:
        return self._attempts[place].state

    def places_of(self, group: int) -> list[Place]:
        return [life.place for life in self._groups[group].attempts]

    def awaits_grade(self, place: Place) -> bool:
        life = self._attempts.get(place)
        return life is not None and life.state is Phase.GRADING

    @property
    def num_attempts(self) -> int:
        """Of groups that no batch has used up."""
        return sum(len(group.attempts) for group in self._groups.values())

    @property
    def num_accepted(self) -> int:
        """Groups that wait to be trained on."""
        return self._num_accepted

    @property
    def num_queued(self) -> int:
        return self._counts[Phase.QUEUED]

    @property
    def num_grading(self) -> int:
        return self._counts[Phase.GRADING]

    @property
    def open_page(self) -> Page:
        """What no batch has used up so far."""
        return Page(self._cursor, tuple(self._groups.values()))

    @property
    def stands_at(self) -> tuple[int, int]:
        """The first problem of the next batch, and the weights version that it trains."""
        return self._cursor, self._next_version

    # ---------------------------------------------------------------------------------------------- transitions
    @property
    def _room(self) -> int:
        """Groups that may be open or accepted now."""
        terms = self.terms
        batches = self._version - self._next_version + 1 + self._pace.lead
        room = min(math.floor(batches * terms.num_groups), self._batches_left * terms.num_groups)
        return room + terms.redundant_groups if room > 0 else 0

    @property
    def _last_draw(self) -> float:
        """The first problem that is out of reach."""
        terms = self.terms
        if terms.max_draws is None:
            return math.inf
        return self._cursor + terms.max_draws + math.floor(terms.ahead * terms.num_groups)

    def _draw(self, now: float) -> None:
        while not self._stopped and self._num_live < self._room and self._next_draw < self._last_draw:
            group = GroupState(self._next_draw, self._version, now, awaits_greedy=self.terms.greedy_baseline)
            numbers = list(range(self.terms.group_size + self.terms.redundant_attempts))
            for number in [GREEDY_ATTEMPT, *numbers] if self.terms.greedy_baseline else numbers:
                life = AttemptState((group.number, number), Phase.QUEUED, [(Phase.QUEUED, now)])
                group.attempts.append(life)
                self._attempts[life.place] = life
                self._queue.append(life)
            self._num_under_way += len(group.attempts)
            self._counts[Phase.QUEUED] += len(group.attempts)
            self._num_live += 1
            self._groups[group.number] = group
            self._new_draws.append(group.number)
            self._next_draw += 1

    def _move(self, life: AttemptState, state: Phase, now: float) -> None:
        assert state in NEXT[life.state], f"attempt {life.place} is {life.state} and cannot become {state}"
        self._num_under_way -= state in ENDED
        self._counts[life.state] -= 1
        self._counts[state] += 1
        life.state = state
        life.history.append((state, now))
        if state is Phase.ABORTED and life.place[0] < self._cursor:
            del self._attempts[life.place]

    def _given_back(self, place: Place, num_tokens: int, now: float) -> AttemptState | None:
        """By its engine; None if it is not needed any more."""
        life = self._attempts[place]
        self._leave_engine(life, num_tokens, now)
        if life.state is not Phase.ABORTING:
            return life
        self._move(life, Phase.ABORTED, now)
        return None

    def _leave_engine(self, life: AttemptState, num_tokens: int, now: float) -> None:
        since = next(at for state, at in reversed(life.history) if state is Phase.GENERATING)
        life.spans.append(Span(life.engine, since, now, num_tokens - life.num_tokens))
        life.num_tokens = num_tokens

    def _look_at(self, group: GroupState, now: float) -> None:
        """Complete is a group with enough grades, or without an attempt that could still get one; and its baseline."""
        wanted, made = self.terms.group_size, self.terms.group_size + self.terms.redundant_attempts
        if len(group.rewards) < wanted and len(group.rewards) + group.num_failed < made:
            return
        for life in group.attempts if self.terms.redundant_attempts else ():
            if life.place[1] != GREEDY_ATTEMPT:
                self._abort(life, now)
        if not group.awaits_greedy:
            self._close(group, self._judge(group))
            if self.is_full:
                self._pace.full(now)
            self._draw(now)

    def _judge(self, group: GroupState) -> DrawOutcome:
        """By rewards in the order of attempts, so that sums do not depend on who was first."""
        if self.terms.is_useful is None:
            return DrawOutcome.TRAINED
        if not group.rewards:
            return DrawOutcome.FAILED
        rewards = [group.rewards[number] for number in sorted(group.rewards)]
        return DrawOutcome.TRAINED if self.terms.is_useful(rewards) else DrawOutcome.FILTERED

    def _close(self, group: GroupState, outcome: DrawOutcome) -> None:
        group.outcome = outcome
        if outcome is DrawOutcome.TRAINED:
            self._num_accepted += 1
        else:
            self._num_live -= 1
        self._look_ahead()

    def _look_ahead(self) -> None:
        while (group := self._groups.get(self._decided_until)) is not None and group.outcome is not None:
            self._num_accepted_in_order += group.outcome is DrawOutcome.TRAINED
            self._decided_until += 1

    def _is_live(self, group: GroupState) -> bool:
        return group.outcome in (None, DrawOutcome.TRAINED)

    def _give_up(self, group: GroupState, now: float) -> None:
        """No batch is going to have it."""
        self._num_live -= 1
        self._num_accepted -= group.outcome is DrawOutcome.TRAINED
        group.outcome = DrawOutcome.ABORTED
        for life in group.attempts:
            self._abort(life, now)

    def _leave_behind(self, page: Page) -> None:
        """Forget what a batch used up, but for attempts that engines still have."""
        self._cursor = page.first + len(page.groups)
        self._num_live -= self.terms.num_groups
        self._num_accepted -= self.terms.num_groups
        for group in page.groups:
            for life in group.attempts:
                if life.state is not Phase.ABORTING:
                    del self._attempts[life.place]
        self._decided_until = self._cursor
        self._num_accepted_in_order = 0
        self._look_ahead()

    def _abort(self, life: AttemptState, now: float) -> None:
        match life.state:
            case Phase.GENERATING:
                self._move(life, Phase.ABORTING, now)
                self._to_abort.append(life.place)
            case Phase.QUEUED | Phase.GENERATED | Phase.GRADING:
                self._move(life, Phase.ABORTED, now)
            case _:
                pass
