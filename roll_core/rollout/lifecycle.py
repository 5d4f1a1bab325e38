"""What may become of every attempt of a stage, as a state machine: what happened goes in, what is to be done comes out.

    queued -> generating -> generated -> grading -> graded | failed        its group: trained | filtered | failed
       \________________________________________________ aborted (by way of aborting, while an engine has it)

It calls nobody, waits for nobody and reads no clock: whoever drives it (`scheduler.py`, the tests) says what happened and
when. Every step costs the same however many attempts are in flight. A group is judged the moment it is complete. As many
groups are open or accepted as are asked for, and the redundant ones: one that is left out is replaced by the next.

Without redundancy every group that is drawn is judged, by its rewards alone. What is drawn is then the shortest beginning of
the stream that holds enough useful groups, whatever finishes first. With redundancy the first to finish win, and what is
consumed depends on timing; it leans towards what is quick, which the metrics show.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from roll_core.types.manifest import DrawOutcome
from roll_core.types.trajectory import GREEDY_ATTEMPT

Place = tuple[int, int]
"""An attempt by its group (the draw's offset in the stream from where the stage began) and its number there."""
IsUseful = Callable[[Sequence[float]], bool]
"""Whether a group with these rewards is to be trained on; there is at least one."""


class State(StrEnum):
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
    State.QUEUED: {State.GENERATING, State.ABORTED, State.ABANDONED},
    State.GENERATING: {State.GENERATED, State.QUEUED, State.ABORTING, State.ABANDONED},
    State.GENERATED: {State.GRADING, State.GRADED, State.FAILED, State.ABORTED, State.ABANDONED},
    State.GRADING: {State.GRADED, State.FAILED, State.GENERATED, State.ABORTED, State.ABANDONED},
    State.GRADED: set(),
    State.FAILED: set(),
    State.ABORTING: {State.ABORTED},
    State.ABORTED: set(),
    State.ABANDONED: set(),
}
"""What may follow what. Back to queued or generated goes what was lost with an engine or a grader."""
ENDED = frozenset(state for state, following in NEXT.items() if not following)


@dataclass(frozen=True)
class Terms:
    """What a stage asks for.

    Example: Terms(num_groups=32, group_size=8, redundant_groups=4, max_draws=256, is_useful=lambda rewards: any(rewards))
    """

    num_groups: int
    group_size: int
    greedy_baseline: bool = False
    """One attempt more in each group, that it cannot do without."""
    redundant_groups: int = 0
    redundant_attempts: int = 0
    max_draws: int | None = None
    is_useful: IsUseful | None = None
    """None takes every group as it comes, one that nobody could grade included."""


@dataclass(slots=True)
class AttemptLife:
    place: Place
    state: State
    history: list[tuple[State, float]]
    """Every state it was in, with the time it came there."""
    num_tokens: int = 0


@dataclass(slots=True)
class GroupLife:
    number: int
    outcome: DrawOutcome | None = None
    """None while it is open; TRAINED are those a stage answers with."""
    attempts: list[AttemptLife] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    """By attempt, without the greedy one's."""
    num_failed: int = 0
    awaits_greedy: bool = False

    @property
    def consumed(self) -> list[AttemptLife]:
        """Attempts a stage answers with, if it answers with this group."""
        return [life for life in self.attempts if life.state in (State.GRADED, State.FAILED)]


class Lifecycle:
    """Example: a group of one attempt, from its draw to a full batch.

    life = Lifecycle(Terms(num_groups=1, group_size=1), now=0.0)
    life.new_draws()                        # [0]
    life.next_queued()                      # (0, 0)
    life.generating((0, 0), now=0.1)
    life.generated((0, 0), num_tokens=5, now=0.9)
    life.to_grade(now=0.9)                  # [(0, 0)]
    life.graded((0, 0), reward=1.0, now=1.0)
    life.is_full                            # True
    """

    def __init__(self, terms: Terms, now: float):
        self._terms = terms
        self.groups: list[GroupLife] = []
        self._open: dict[int, GroupLife] = {}
        self._attempts: dict[Place, AttemptLife] = {}
        self._num_under_way = 0
        self._num_accepted = 0
        self._stopped = False
        self._new_draws: list[int] = []
        self._queue: deque[AttemptLife] = deque()
        self._to_grade: deque[AttemptLife] = deque()
        self._to_abort: list[Place] = []
        for _ in range(terms.num_groups + terms.redundant_groups):
            self._draw(now)

    # ---------------------------------------------------------------------------------------------- what is to be done
    def new_draws(self) -> list[int]:
        """Groups drawn since this was last asked."""
        drawn, self._new_draws = self._new_draws, []
        return drawn

    def next_queued(self) -> Place | None:
        """The attempt to generate next, until `generating` says that it is."""
        while self._queue and self._queue[0].state is not State.QUEUED:
            self._queue.popleft()
        return self._queue[0].place if self._queue else None

    def to_grade(self, now: float) -> list[Place]:
        """Attempts that wait for a grader, which from now on has them."""
        waiting = [life for life in self._to_grade if life.state is State.GENERATED]
        self._to_grade.clear()
        for life in waiting:
            self._move(life, State.GRADING, now)
        return [life.place for life in waiting]

    def to_abort(self) -> list[Place]:
        """Attempts that engines need not go on with, each told once. They still come back, with what they have."""
        places, self._to_abort = self._to_abort, []
        return places

    @property
    def is_full(self) -> bool:
        return self._num_accepted == self._terms.num_groups

    @property
    def is_settled(self) -> bool:
        """Nothing is under way any more: the batch is full and engines are free, or it cannot become full."""
        return not self._num_under_way

    # ---------------------------------------------------------------------------------------------- what happened
    def generating(self, place: Place, now: float) -> None:
        self._move(self._attempts[place], State.GENERATING, now)

    def generated(self, place: Place, num_tokens: int, now: float) -> None:
        """An engine is done with it: to its end, or because it was told to abort."""
        life = self._attempts[place]
        life.num_tokens = num_tokens
        if life.state is State.ABORTING:
            self._move(life, State.ABORTED, now)
            return
        self._move(life, State.GENERATED, now)
        self._to_grade.append(life)

    def graded(self, place: Place, reward: float | None, now: float) -> None:
        """It has a grade, or (None) is known to get none. Too late for one whose group was decided: that says nothing."""
        life = self._attempts[place]
        if life.state is State.ABORTED:
            return
        self._move(life, State.FAILED if reward is None else State.GRADED, now)
        group, number = self._open[place[0]], place[1]
        if number == GREEDY_ATTEMPT:
            group.awaits_greedy = False
        elif reward is None:
            group.num_failed += 1
        else:
            group.rewards[number] = reward
        self._look_at(group, now)

    def lost(self, place: Place, now: float) -> None:
        """The engine or grader that had it is no more: it waits for another one."""
        life = self._attempts[place]
        match life.state:
            case State.GRADING:
                self._move(life, State.GENERATED, now)
                self._to_grade.append(life)
            case State.ABORTING:
                self._move(life, State.ABORTED, now)
            case State.ABORTED:
                pass  # by the time its grader died nobody wanted its grade
            case _:
                self._move(life, State.QUEUED, now)
                self._queue.append(life)

    def abandoned(self, place: Place, now: float) -> None:
        """It cannot be finished in this stage, which therefore fails: nothing more is drawn, what is under way goes on."""
        self._stopped = True
        life = self._attempts[place]
        if life.state is State.ABORTING:
            self._move(life, State.ABORTED, now)
        elif life.state is not State.ABORTED:
            self._move(life, State.ABANDONED, now)

    # ---------------------------------------------------------------------------------------------- what became of it
    def state_of(self, place: Place) -> State:
        return self._attempts[place].state

    def places_of(self, group: int) -> list[Place]:
        return [life.place for life in self.groups[group].attempts]

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    @property
    def num_accepted(self) -> int:
        return self._num_accepted

    @property
    def outcomes(self) -> str:
        """What became of every draw, a letter each (as in `Draws`). For a stage that succeeded."""
        undecided = [group.number for group in self.groups if group.outcome is None]
        assert not undecided, f"groups {undecided} are still open"
        return "".join(group.outcome.letter for group in self.groups if group.outcome is not None)

    @property
    def consumed(self) -> list[Place]:
        """The attempts of the batch, in order."""
        accepted = (group for group in self.groups if group.outcome is DrawOutcome.TRAINED)
        return sorted(life.place for group in accepted for life in group.consumed)

    # ---------------------------------------------------------------------------------------------- transitions
    def _draw(self, now: float) -> None:
        if self._stopped or len(self.groups) == self._terms.max_draws:
            return
        group = GroupLife(len(self.groups), awaits_greedy=self._terms.greedy_baseline)
        numbers = list(range(self._terms.group_size + self._terms.redundant_attempts))
        for number in [GREEDY_ATTEMPT, *numbers] if self._terms.greedy_baseline else numbers:
            life = AttemptLife((group.number, number), State.QUEUED, [(State.QUEUED, now)])
            group.attempts.append(life)
            self._attempts[life.place] = life
            self._queue.append(life)
        self._num_under_way += len(group.attempts)
        self._open[group.number] = group
        self.groups.append(group)
        self._new_draws.append(group.number)

    def _move(self, life: AttemptLife, state: State, now: float) -> None:
        assert state in NEXT[life.state], f"attempt {life.place} is {life.state} and cannot become {state}"
        self._num_under_way -= state in ENDED
        life.state = state
        life.history.append((state, now))

    def _look_at(self, group: GroupLife, now: float) -> None:
        """Complete is a group with enough grades, or without an attempt that could still get one; and its baseline."""
        wanted, made = self._terms.group_size, self._terms.group_size + self._terms.redundant_attempts
        if len(group.rewards) < wanted and len(group.rewards) + group.num_failed < made:
            return
        for life in group.attempts if self._terms.redundant_attempts else ():
            if life.place[1] != GREEDY_ATTEMPT:
                self._abort(life, now)
        if not group.awaits_greedy:
            self._close(group, self._judge(group), now)

    def _judge(self, group: GroupLife) -> DrawOutcome:
        """By rewards in the order of attempts, so that sums do not depend on who was first."""
        if self._terms.is_useful is None:
            return DrawOutcome.TRAINED
        if not group.rewards:
            return DrawOutcome.FAILED
        rewards = [group.rewards[number] for number in sorted(group.rewards)]
        return DrawOutcome.TRAINED if self._terms.is_useful(rewards) else DrawOutcome.FILTERED

    def _close(self, group: GroupLife, outcome: DrawOutcome, now: float) -> None:
        group.outcome = outcome
        del self._open[group.number]
        if outcome is not DrawOutcome.TRAINED:
            self._draw(now)
            return
        self._num_accepted += 1
        if self.is_full:
            for late in self._open.values():
                late.outcome = DrawOutcome.ABORTED
                for life in late.attempts:
                    self._abort(life, now)
            self._open.clear()

    def _abort(self, life: AttemptLife, now: float) -> None:
        match life.state:
            case State.GENERATING:
                self._move(life, State.ABORTING, now)
                self._to_abort.append(life.place)
            case State.QUEUED | State.GENERATED | State.GRADING:
                self._move(life, State.ABORTED, now)
            case _:
                pass
