"""State machine of attempts and groups: transitions worked by hand, and random sequences of events."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.config.rollout import GroupFilter, RolloutConfig
from roll_core.rollout.filter import build_filter
from roll_core.rollout.lifecycle import NEXT, AttemptId, GroupState, LedgerPage, Lifecycle, Phase, StreamSpec
from roll_core.rollout.lookahead import Lookahead
from roll_core.rollout.metrics import page_metrics
from roll_core.types.manifest import DrawOutcome
from roll_core.types.trajectory import GREEDY_ATTEMPT

FIRST_PROBLEM = 7


def schedules(count: int) -> settings:
    """Hypothesis settings for `count` random schedules, without a deadline."""
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


# -------------------------------------------------------------------------------------------------- by hand
def started(spec: StreamSpec) -> Lifecycle:
    """Lifecycle whose drawn attempts are all with an engine."""
    lifecycle = Lifecycle(spec, first=0, version=0, now=0.0)
    issue(lifecycle)
    return lifecycle


def issue(lifecycle: Lifecycle) -> list[AttemptId]:
    """Give every queued attempt to an engine; return their ids."""
    issued = []
    while (attempt_id := lifecycle.next_queued()) is not None:
        lifecycle.generating(attempt_id, "engine", now=0.0)
        issued.append(attempt_id)
    return issued


def end(lifecycle: Lifecycle, attempt_id: AttemptId, reward: float | None, num_tokens: int = 5) -> None:
    """Report that an attempt was generated and graded; a reward of None is a failed grade."""
    lifecycle.generated(attempt_id, num_tokens, now=1.0)
    assert lifecycle.to_grade(now=1.0) == [attempt_id]
    lifecycle.graded(attempt_id, reward, now=2.0)


def rewards_differ(rewards: list[float]) -> bool:
    return len(set(rewards)) > 1


def test_a_group_that_is_not_useful_is_replaced_at_once_by_the_next():
    lifecycle = started(StreamSpec(num_groups=2, group_size=2, is_useful=rewards_differ))
    assert lifecycle.new_draws() == [0, 1]
    end(lifecycle, (1, 0), 1.0)
    end(lifecycle, (1, 1), 1.0)
    assert lifecycle.new_draws() == [2]
    assert issue(lifecycle) == [(2, 0), (2, 1)]
    for attempt_id, reward in {(0, 0): 0.0, (0, 1): 1.0, (2, 1): 0.5, (2, 0): 0.0}.items():
        assert not lifecycle.is_full
        end(lifecycle, attempt_id, reward)
    assert lifecycle.is_full
    assert lifecycle.is_settled
    page = lifecycle.take(now=3.0)
    assert page.outcomes == "tft"
    assert page.consumed == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_a_group_without_grades_is_kept_without_a_filter_and_replaced_with_one():
    for useful, outcomes in ((None, "t"), (rewards_differ, "x")):
        lifecycle = started(StreamSpec(num_groups=1, group_size=2, max_draws=1, is_useful=useful))
        end(lifecycle, (0, 0), None)
        end(lifecycle, (0, 1), None)
        assert lifecycle.pending_page.outcomes == outcomes
        assert lifecycle.is_settled


def test_redundant_attempts_are_aborted_when_enough_are_graded_and_the_baseline_is_waited_for():
    lifecycle = started(StreamSpec(num_groups=1, group_size=2, greedy_baseline=True, redundant_attempts=2))
    end(lifecycle, (0, 3), 1.0)
    end(lifecycle, (0, 0), None)  # a redundant attempt replaces the failed one
    end(lifecycle, (0, 2), 0.0, num_tokens=7)
    assert lifecycle.to_abort() == [(0, 1)]
    assert not lifecycle.is_full
    end(lifecycle, (0, GREEDY_ATTEMPT), 1.0)
    page = lifecycle.take(now=2.0)
    assert lifecycle.is_aborting  # an engine still runs an aborted attempt
    lifecycle.generated((0, 1), num_tokens=3, now=3.0)
    assert lifecycle.is_settled
    assert page.consumed == [(0, -1), (0, 0), (0, 2), (0, 3)]
    metrics = page_metrics(page)
    assert metrics["rollout/aborted_attempts"] == 1.0
    assert metrics["rollout/wasted_tokens"] == 3.0
    assert metrics["rollout/mean_tokens_consumed"] == pytest.approx(17 / 3)
    assert metrics["rollout/mean_tokens_generated"] == 5.0
    assert (metrics["rollout/mean_seconds_generating"], metrics["rollout/mean_seconds_grading"]) == (1.0, 1.0)


def test_redundant_groups_are_aborted_when_the_batch_is_full_in_whatever_phase_their_attempts_are():
    lifecycle = Lifecycle(StreamSpec(num_groups=1, group_size=1, redundant_groups=3), first=0, version=0, now=0.0)
    for attempt_id in ((0, 0), (1, 0), (2, 0)):
        lifecycle.generating(attempt_id, "engine", now=0.0)
    end(lifecycle, (1, 0), 1.0)
    page = lifecycle.take(now=2.0)
    assert page.outcomes == "ataa"
    assert lifecycle.to_abort() == [(0, 0), (2, 0)]
    assert lifecycle.next_queued() is None
    lifecycle.lost((0, 0), now=2.0)  # its engine died
    lifecycle.generated((2, 0), 4, now=2.0)  # finished before the abort reached its engine
    assert lifecycle.is_settled
    assert [group.attempts[0].phase for group in page.groups] == [
        Phase.ABORTED,
        Phase.GRADED,
        Phase.ABORTED,
        Phase.ABORTED,
    ]


def test_the_grade_of_an_aborted_attempt_is_ignored():
    lifecycle = started(StreamSpec(num_groups=1, group_size=1, redundant_attempts=1))
    for number in (0, 1):
        lifecycle.generated((0, number), 5, now=1.0)
    assert lifecycle.to_grade(now=1.0) == [(0, 0), (0, 1)]
    lifecycle.graded((0, 1), 1.0, now=2.0)
    lifecycle.graded((0, 0), 0.0, now=2.0)
    assert lifecycle.take(now=2.0).consumed == [(0, 1)]
    lifecycle.graded((0, 0), 0.0, now=3.0)


@pytest.mark.parametrize(
    ("impossible", "message"),
    [
        (
            lambda lifecycle: lifecycle.generating((0, 0), "engine", 1.0),
            r"attempt \(0, 0\) is generating and cannot become generating",
        ),
        (lambda lifecycle: lifecycle.graded((0, 0), 1.0, 1.0), r"attempt \(0, 0\) is generating and cannot become graded"),
        (
            lambda lifecycle: (end(lifecycle, (0, 1), 1.0), end(lifecycle, (0, 1), 1.0)),
            r"attempt \(0, 1\) is graded and cannot",
        ),
        (
            lambda lifecycle: (end(lifecycle, (0, 1), 1.0), lifecycle.lost((0, 1), 1.0)),
            r"attempt \(0, 1\) is graded and cannot",
        ),
    ],
)
def test_an_impossible_transition_names_the_attempt(impossible, message):
    with pytest.raises(AssertionError, match=message):
        impossible(started(StreamSpec(num_groups=1, group_size=2)))


@pytest.mark.parametrize(
    ("keep", "rewards", "useful"),
    [
        (GroupFilter(equal_rewards=True), [1.0, 1.0], False),
        (GroupFilter(equal_rewards=True), [0.0, 1e-9], True),
        (GroupFilter(min_spread=0.5), [0.25, 0.5], False),
        (GroupFilter(min_spread=0.5), [0.25, 0.75], True),
        (GroupFilter(min_mean=0.5), [0.0, 0.75], False),
        (GroupFilter(min_mean=0.5), [0.25, 0.75], True),
        (GroupFilter(max_mean=0.5), [0.5, 0.75], False),
        (GroupFilter(min_mean=0.25, max_mean=0.5), [0.25, 0.75], True),
    ],
)
def test_filters_by_hand(keep, rewards, useful):
    assert build_filter(keep)(rewards) is useful


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"filter": {}}, "it leaves nothing out"),
        ({"filter": {"min_mean": 0.9, "max_mean": 0.1}}, "min_mean .0.9. must not be above max_mean .0.1."),
        ({"filter": {"equal_rewards": True}, "group_size": 1}, "one reward has no spread"),
        ({"max_draws": 0.5}, "greater than or equal to 1"),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(section, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig.model_validate(section)


# -------------------------------------------------------------------------------------------------- working ahead
def test_as_many_groups_are_drawn_ahead_as_the_ratio_allows_and_no_more():
    lifecycle = started(StreamSpec(num_groups=2, group_size=1, num_batches=9, ahead=1.5))
    assert lifecycle.new_draws() == [0, 1, 2, 3, 4]
    for number in (1, 0, 2):
        end(lifecycle, (number, 0), 1.0)
    assert lifecycle.new_draws() == []  # an accepted group counts against the limit until it is trained on
    assert lifecycle.take(now=3.0).consumed == [(0, 0), (1, 0)]
    assert lifecycle.new_draws() == []  # the weights have not moved: a later group could become too old
    lifecycle.adopted(1, now=4.0)
    assert lifecycle.new_draws() == [5, 6]
    assert lifecycle.position == (2, 1)


def test_a_batch_is_in_stream_order_and_waits_for_earlier_groups():
    lifecycle = started(StreamSpec(num_groups=2, group_size=1, num_batches=9, ahead=2.0))
    for number in (1, 2, 3, 5):
        end(lifecycle, (number, 0), 1.0)
        assert not lifecycle.is_full
    end(lifecycle, (0, 0), 1.0)
    assert [lifecycle.take(now=3.0).consumed for _ in range(2)] == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]
    assert not lifecycle.is_full


def test_with_redundant_groups_the_first_to_finish_win_and_groups_that_became_too_old_are_aborted():
    lifecycle = started(StreamSpec(num_groups=2, group_size=1, num_batches=9, ahead=1.0, redundant_groups=1))
    assert lifecycle.new_draws() == [0, 1, 2, 3, 4]
    for number in (1, 3):
        end(lifecycle, (number, 0), 1.0)
    first = lifecycle.take(now=3.0)
    assert (first.outcomes, first.consumed) == ("atat", [(1, 0), (3, 0)])
    assert lifecycle.to_abort() == [(0, 0), (2, 0)]
    assert lifecycle.new_draws() == [5, 6]
    lifecycle.adopted(1, now=4.0)
    assert lifecycle.new_draws() == [7, 8]
    issue(lifecycle)
    for number in (7, 8):
        end(lifecycle, (number, 0), 1.0)
    second = lifecycle.take(now=5.0)  # trains version 1; the next batch trains version 2, and 4 to 6 are of version 0
    assert (second.outcomes, second.consumed) == ("aaatt", [(7, 0), (8, 0)])
    assert lifecycle.position == (9, 2)


def test_no_group_is_drawn_that_no_batch_needs():
    lifecycle = started(StreamSpec(num_groups=2, group_size=1, num_batches=2, ahead=4.0))
    assert lifecycle.new_draws() == [0, 1, 2, 3]


def test_an_interrupted_attempt_is_issued_first_and_keeps_its_tokens():
    lifecycle = started(StreamSpec(num_groups=1, group_size=2))
    lifecycle.interrupted((0, 1), num_tokens=3, now=1.0)
    lifecycle.lost((0, 0), now=1.5)
    assert lifecycle.next_queued() == (0, 1)
    lifecycle.generating((0, 1), "other", now=2.0)
    lifecycle.generated((0, 1), num_tokens=5, now=4.0)
    (attempt,) = [attempt for attempt in lifecycle.pending_page.groups[0].attempts if attempt.attempt_id == (0, 1)]
    assert [(span.engine, span.begin, span.end, span.num_tokens) for span in attempt.spans] == [
        ("engine", 0.0, 1.0, 3),
        ("other", 2.0, 4.0, 2),
    ]


# -------------------------------------------------------------------------------------------------- random events
SPECS = st.builds(
    StreamSpec,
    num_groups=st.integers(1, 4),
    group_size=st.integers(1, 3),
    num_batches=st.integers(1, 5),
    ahead=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    greedy_baseline=st.booleans(),
    redundant_groups=st.sampled_from([0, 0, 1, 3]),
    redundant_attempts=st.sampled_from([0, 0, 2]),
    max_draws=st.just(20),
    is_useful=st.sampled_from([None, lambda rewards: max(rewards) > 0.5]),
)


class RandomDriver:
    """Random driver of a lifecycle, one event at a time: losses, interruptions, failed grades, new weights, in any order."""

    def __init__(self, spec: StreamSpec, seed: int, share_failing: float):
        self.rng = random.Random(seed)
        self.lifecycle = Lifecycle(spec, first=0, version=0, now=0.0)
        self.share_failing = share_failing
        self.version = 0
        self.engines: list[AttemptId] = []
        self.graders: list[AttemptId] = []
        self.pages: list[LedgerPage] = []
        self.losses = 20

    @property
    def is_over(self) -> bool:
        return self.lifecycle.is_settled and not self.lifecycle.is_full and self.version == len(self.pages)

    def step(self, now: float) -> None:
        rng, lifecycle = self.rng, self.lifecycle
        lifecycle.to_abort()
        if self.version < len(self.pages) and rng.random() < 0.3:
            self.version += 1
            lifecycle.adopted(self.version, now)
        if len(self.pages) == self.version and lifecycle.is_full and rng.random() < 0.3:
            self.pages.append(lifecycle.take(now))
        if (attempt_id := lifecycle.next_queued()) is not None and (not self.engines or rng.random() < 0.5):
            lifecycle.generating(attempt_id, "engine", now)
            self.engines.append(attempt_id)
        self.graders += lifecycle.to_grade(now) if rng.random() < 0.7 or not self.engines else []
        held = rng.choice([holder for holder in (self.engines, self.graders) if holder] or [[]])
        if held:
            self.end(held.pop(rng.randrange(len(held))), held is self.engines, now)

    def end(self, attempt_id: AttemptId, at_engine: bool, now: float) -> None:
        chance = self.rng.random() if self.losses else 1.0
        self.losses -= chance < 0.15
        if chance < 0.1:
            self.lifecycle.lost(attempt_id, now)
        elif not at_engine:
            failed = self.rng.random() < self.share_failing
            self.lifecycle.graded(attempt_id, None if failed else self.rng.choice([0.0, 1.0]), now)
        elif chance < 0.15:
            self.lifecycle.interrupted(attempt_id, 1, now)
        else:
            self.lifecycle.generated(attempt_id, 1 + int(now) % 3, now)


@schedules(800)
@given(SPECS, st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
def test_every_attempt_takes_a_legal_path_and_ends_whatever_the_order_of_events(spec, seed, share_failing):
    driver = RandomDriver(spec, seed, share_failing)
    now = 0.0
    while not driver.is_over:
        now += 1.0
        assert now < 100_000, "it does not come to an end"
        driver.step(now)
    assert not driver.engines
    rest = driver.lifecycle.pending_page
    check_attempts([group for page in [*driver.pages, rest] for group in page.groups])
    if len(driver.pages) < spec.num_batches:
        assert spec.is_useful is not None
        assert len(rest.groups) == 20 + math.floor(spec.ahead * spec.num_groups)
    for trained, page in enumerate(driver.pages):
        check_page(spec, trained, page)


def check_attempts(groups: list[GroupState]) -> None:
    """Assert that every attempt ended by legal transitions in order of time."""
    assert [group.number for group in groups] == list(range(len(groups)))
    for attempt in (attempt for group in groups for attempt in group.attempts):
        assert attempt.phase in (Phase.GRADED, Phase.FAILED, Phase.ABORTED)
        assert all(after in NEXT[before] for (before, _), (after, _) in pairwise(attempt.history))
        assert [now for _, now in attempt.history] == sorted(now for _, now in attempt.history)
        assert sum(span.num_tokens for span in attempt.spans) == attempt.num_tokens


def check_page(spec: StreamSpec, trained: int, page: LedgerPage) -> None:
    """Assert that the batch of one iteration is full, young enough, and accounts for wasted tokens."""
    accepted = [group for group in page.groups if group.outcome is DrawOutcome.TRAINED]
    assert len(accepted) == spec.num_groups
    assert len(page.outcomes) == len(page.groups)
    assert all(trained - math.ceil(spec.ahead) <= group.version <= trained for group in accepted)
    if not spec.redundant_groups:
        assert "a" not in page.outcomes
    consumed = set(page.consumed)
    every = [attempt for group in page.groups for attempt in group.attempts]
    wasted = sum(attempt.num_tokens for attempt in every if attempt.attempt_id not in consumed)
    assert page_metrics(page)["rollout/wasted_tokens"] == wasted


# -------------------------------------------------------------------------------------------------- pacing
def test_the_lead_shrinks_while_finished_batches_wait_and_grows_at_once_when_the_trainer_waits():
    lookahead = Lookahead(3.0)
    now = 0.0
    lookahead.batch_taken(now, is_full=True)
    for expected in (2.75, 2.5, 2.25):  # finished ever since the batch before it was taken
        lookahead.batch_taken(now := now + 2.0, is_full=True)
        assert lookahead.lead == expected
    lookahead.batch_taken(now := now + 2.0, is_full=False)
    lookahead.batch_ready(now + 1.0)
    lookahead.batch_taken(now := now + 2.0, is_full=False)  # finished for half of the time before it was taken
    assert lookahead.lead == 2.0 - 0.125
    lookahead.batch_ready(now + 2.0)
    lookahead.batch_taken(now := now + 2.0, is_full=False)  # the trainer waited for it
    assert lookahead.lead == 2.375
    lookahead.batch_ready(now + 1.95)
    lookahead.batch_taken(now := now + 2.0, is_full=False)  # hardly early: the trainer waited nearly as long
    assert lookahead.lead == 2.875
    lookahead.batch_ready(now + 2.0)
    lookahead.batch_taken(now + 2.0, is_full=False)
    assert lookahead.lead == 3.0


@pytest.mark.parametrize(("most", "least"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (4.0, 1.0)])
def test_the_lead_stays_within_its_bounds(most, least):
    lookahead = Lookahead(most)
    for now in range(100):
        lookahead.batch_taken(float(now), is_full=True)
    assert lookahead.lead == least


def test_while_the_trainer_is_slower_its_batches_become_one_version_old_and_it_never_waits():
    """Every batch takes a second to generate and ten to train."""
    lifecycle, stale = started(StreamSpec(num_groups=4, group_size=1, num_batches=60, ahead=3.0)), []
    for version in range(60):
        for attempt_id in [(g.number, 0) for g in lifecycle.pending_page.groups if g.outcome is None]:
            lifecycle.generated(attempt_id, num_tokens=1, now=10.0 * version + 1.0)
            lifecycle.to_grade(now=10.0 * version + 1.0)
            lifecycle.graded(attempt_id, reward=1.0, now=10.0 * version + 1.0)
        assert lifecycle.is_full
        page = lifecycle.take(now=10.0 * version + 1.0 if version == 0 else 10.0 * version + 2.0)
        stale.append(max(version - group.version for group in page.groups))
        issue(lifecycle)
        lifecycle.adopted(version + 1, now=10.0 * (version + 1))
        issue(lifecycle)
    assert max(stale[:8]) == 3
    assert set(stale[-20:]) == {1}
