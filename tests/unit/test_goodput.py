"""Goodput of legs: seconds by kind of use, worked by hand."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from roll_core.reporting.goodput import (
    commits_in_logs,
    events_until,
    goodput_metrics,
    leg_histories,
    leg_measurements,
    leg_rows,
)
from roll_core.reporting.stage_log import FILE_NAME, Edge, StageEvent, StageLog, read_stages, read_stages_by_leg

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def at(second: float, name: str, edge: Edge) -> StageEvent:
    return StageEvent(name=name, edge=edge, at=NOON + timedelta(seconds=second))


def stage(name: str, begin: float, end: float, edge: Edge = Edge.END) -> list[StageEvent]:
    return [at(begin, name, Edge.BEGIN), at(end, name, edge)]


FIRST_LEG = [
    *stage("start", 0, 10),
    *stage("warm_start", 10, 18),
    *stage("commit 0", 19, 20),
    *stage("recover", 20, 21),
    *stage("collect 1", 21, 25),
    *stage("update 1", 26, 28),  # the second in between is spent in the loop, and is part of the iteration
    *stage("commit 1", 28, 29),
    *stage("collect 2", 30, 34),
    at(34, "update 2", Edge.BEGIN),  # killed here
]
SECOND_LEG = [
    *stage("start", 60, 68),
    *stage("recover", 68, 71),
    *stage("update 2", 72, 74),  # the result of collect 2 was cached
    *stage("commit 2", 74, 75),
    *stage("collect 3", 75, 77, Edge.FAILED),
]
THIRD_LEG = [*stage("start", 80, 86), *stage("recover", 86, 87), *stage("collect 3", 87, 91), *stage("commit 3", 91, 92)]
LEGS = {1: FIRST_LEG, 2: SECOND_LEG, 3: THIRD_LEG}


def test_every_second_of_a_leg_is_counted_once():
    first, second, third = leg_histories(LEGS, commits_in_logs(LEGS))
    assert first.model_dump() == {
        "leg": 1,
        "num_committed": 2,
        "useful": 10 + 8 + 4,  # iterations 0 and 1, and a collect that the next leg used
        "lost": 0,  # the end of the update is not in the log, so its seconds are unknown
        "starting": 10,
        "recovering": 1,
        "other": 1,
        "down": 0,
    }
    assert second.model_dump() == {
        "leg": 2,
        "num_committed": 1,
        "useful": 3,
        "lost": 2,  # the failed collect was repeated
        "starting": 8,
        "recovering": 3,
        "other": 1,
        "down": 26,
    }
    assert (third.useful, third.lost, third.down) == (5, 0, 3)
    assert first.total + second.total + third.total == 92, "from the first sign of the run to its last"


def test_work_that_no_leg_committed_is_lost_even_if_it_was_not_repeated():
    [only] = leg_histories({1: FIRST_LEG}, {0: 1, 1: 1})
    assert (only.useful, only.lost) == (18, 4)


def test_a_commit_whose_log_line_is_missing_is_known_from_the_manifests():
    killed = FIRST_LEG[:-4]  # killed after the commit of iteration 1, before its line was written
    assert killed[-1] == at(28, "commit 1", Edge.BEGIN)
    assert commits_in_logs({1: killed}) == {0: 1}
    assert [h.num_committed for h in leg_histories({1: killed}, {0: 1, 1: 1})] == [2]


def test_goodput_metrics_and_the_table_of_legs():
    histories = leg_histories(LEGS, commits_in_logs(LEGS))
    metrics = goodput_metrics(histories)
    assert metrics["goodput/useful_seconds"] == 30
    assert metrics["goodput/down_seconds"] == 29
    assert metrics["goodput/useful_share"] == pytest.approx(30 / 92)
    assert goodput_metrics([])["goodput/useful_share"] == 0.0
    assert leg_rows(histories)[2].split() == ["2", "1", "3.0", "2.0", "8.0", "3.0", "1.0", "26.0", "7%"]


class CountedPasses(list):
    """Events of a leg that count how often they are passed over."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def test_goodput_passes_over_the_events_of_a_leg_a_fixed_number_of_times():
    few, many = (
        CountedPasses(event for number in range(count) for event in stage(f"collect {number}", number, number + 1))
        for count in (2, 200)
    )
    for events in (few, many):
        [only] = leg_histories({1: events}, dict.fromkeys(range(200), 1))
        assert only.useful == len(events) / 2
    assert few.passes == many.passes


def test_goodput_as_of_a_time_does_not_change_afterwards():
    as_of = NOON + timedelta(seconds=74.5)  # within the commit of iteration 2
    then = {1: FIRST_LEG, 2: SECOND_LEG[:7]}
    assert events_until(then, as_of) == {1: FIRST_LEG, 2: SECOND_LEG[:7]}
    now = events_until(LEGS, as_of)
    assert leg_histories(now, {0: 1, 1: 1, 2: 2}) == leg_histories(then, {0: 1, 1: 1, 2: 2})


def test_metrics_of_stages_that_no_manifest_has_are_in_the_stage_log(tmp_path: Path):
    (tmp_path / "leg-2").mkdir()
    log = StageLog(tmp_path / "leg-2")
    with log.stage("recover") as metrics:
        metrics |= {"recover/replayed_iterations": 3, "recover/exact": 1.0}
    with log.stage("store checkpoint") as metrics:
        metrics |= {"checkpoint/megabytes": math.nan}
    with log.stage("collect 3"):
        pass
    assert leg_measurements(read_stages_by_leg(tmp_path)) == [
        "leg 2: recover/replayed_iterations 3, recover/exact 1, checkpoint/megabytes nan"
    ]


def test_logs_are_read_leg_by_leg_in_the_order_of_legs(tmp_path: Path):
    for leg, events in {2: SECOND_LEG, 10: THIRD_LEG}.items():
        (tmp_path / f"leg-{leg}").mkdir()
        lines = "".join(event.model_dump_json() + "\n" for event in events)
        (tmp_path / f"leg-{leg}" / FILE_NAME).write_text(lines + '{"name": "cut sh')
    assert read_stages_by_leg(tmp_path) == {2: SECOND_LEG, 10: THIRD_LEG}
    assert read_stages(tmp_path) == SECOND_LEG + THIRD_LEG
    assert leg_histories({}, {}) == []
