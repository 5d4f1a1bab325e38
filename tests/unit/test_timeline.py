"""Activity of trainer and engines: counts over time, shares and percentiles, and the HTML page that draws them."""

from datetime import UTC, datetime

import pytest

from roll_core.reporting.activity import (
    Percentiles,
    StageSpan,
    count_over_time,
    grading_intervals,
    queue_intervals,
    ready_group_intervals,
    rows_without_overlap,
    stage_spans,
    summarise,
)
from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.reporting.timeline import COLUMNS, timeline_html
from roll_core.types.trace import AttemptTrace, Fate, Span


def stage(name: str, begin: float, end: float) -> list[StageEvent]:
    return [
        StageEvent(name=name, edge=edge, at=datetime.fromtimestamp(at, UTC))
        for edge, at in ((Edge.BEGIN, begin), (Edge.END, end))
    ]


def attempt(problem: int, *spans: Span, fate: Fate = Fate.TRAINED, consumed_at: float = 6.0) -> AttemptTrace:
    end = spans[-1].end
    return AttemptTrace(problem, 0, fate, 5, 0, 0.0, spans, end, end + 1.0, consumed_at)


STAGES = [
    *stage("collect 1", 0.0, 6.0),
    *stage("prepare 1", 6.0, 7.0),
    *stage("update 1", 7.0, 9.0),
    *stage("commit 1", 9.0, 10.0),
    *stage("collect 2", 10.0, 16.0),
    *stage("update 2", 16.0, 19.0),
    *stage("commit 2", 19.0, 20.0),
]
TRACES = [
    attempt(0, Span("engine 0", 1.0, 5.0, 40)),
    attempt(1, Span("engine 0", 1.0, 3.0, 20), Span("engine 1", 4.0, 5.0, 10)),
    attempt(2, Span("engine 1", 0.0, 2.0, 30), fate=Fate.FILTERED),
    attempt(3, Span("engine 0", 10.0, 15.0, 50), consumed_at=16.0),
]


def test_counts_rise_and_fall_with_the_open_intervals():
    counts = count_over_time([(0.0, 2.0), (1.0, 4.0), (1.0, 2.0), (3.0, 3.0)])
    assert counts.times.tolist() == [0.0, 1.0, 2.0, 4.0]
    assert counts.levels.tolist() == [1.0, 3.0, 1.0, 0.0]
    assert counts.peak == 3
    assert counts.mean((0.0, 4.0)) == pytest.approx((1 * 1 + 3 * 1 + 1 * 2) / 4)
    assert counts.mean((-4.0, 8.0)) == pytest.approx(6 / 12)
    assert counts.busy().mean((0.0, 8.0)) == 0.5
    assert count_over_time([]).peak == 0
    assert count_over_time([]).mean((0.0, 1.0)) == 0.0


def test_downsampled_counts_keep_their_area():
    counts = count_over_time([(0.0, 2.0), (1.0, 4.0), (1.0, 2.0)])
    downsampled = counts.downsampled((0.0, 6.0), 2)
    assert downsampled.times.tolist() == [0.0, 3.0, 6.0]
    assert downsampled.levels.tolist() == pytest.approx([5 / 3, 1 / 3, 0.0])


def test_an_attempt_waits_before_and_between_engines():
    assert queue_intervals(TRACES[1]) == [(0.0, 1.0), (3.0, 4.0)]
    never_begun = AttemptTrace(4, 0, Fate.ABORTED, 5, None, 2.0, (), None, None, 6.0)
    assert queue_intervals(never_begun) == [(2.0, 6.0)]


def test_a_group_is_ready_from_its_last_grade_until_it_is_consumed():
    second = AttemptTrace(0, 1, Fate.TRAINED, 5, 0, 0.0, (), 2.0, 5.5, 6.0)
    assert ready_group_intervals([TRACES[0], second, TRACES[2]]) == [(6.0, 6.0)]
    assert ready_group_intervals([second]) == [(5.5, 6.0)]
    assert grading_intervals([TRACES[0], second]) == [(5.0, 6.0), (2.0, 5.5)]


def test_a_stage_that_was_cut_short_is_left_out():
    begun, _ = stage("collect 3", 20.0, 25.0)
    assert [span.name for span in stage_spans([*STAGES[:2], begun])] == ["collect 1"]


def test_the_summary_of_two_iterations_by_hand():
    activity = summarise(stage_spans(STAGES), TRACES)
    assert activity.num_iterations == 2
    assert activity.iteration_seconds == 10.0
    assert activity.stage_seconds == {"collect": 6.0, "prepare": 0.5, "update": 2.5, "commit": 1.0}
    assert activity.trainer_busy == pytest.approx(6 / 20)
    assert activity.bubble == pytest.approx(14 / 20)
    assert activity.engines_busy == pytest.approx((9 / 20 + 3 / 20) / 2)
    assert activity.mean_running == pytest.approx((11 / 20 + 3 / 20) / 2)
    assert activity.attempt_seconds.p50 == 4.0
    assert activity.attempt_tokens.p50 == 35.0
    assert activity.num_tokens == 150
    assert activity.wasted_tokens == {Fate.FILTERED: 30}
    assert activity.staleness == Percentiles(0.0, pytest.approx(0.8), pytest.approx(0.98))


def test_stages_that_overlap_are_drawn_below_each_other():
    spans = [StageSpan("s", name, None, begin, end) for name, begin, end in (("a", 0, 4), ("b", 2, 3), ("c", 4, 5))]
    assert [[span.name for span in row] for row in rows_without_overlap(spans)] == [["a", "c"], ["b"]]


def test_the_page_needs_no_other_file_and_stays_small_however_many_attempts():
    page = timeline_html(STAGES, TRACES, "sort <5>")
    assert "sort &lt;5&gt;" in page
    assert "10 s per iteration: the trainer computes 30% of the time, engines are busy 30%" in page
    assert "<title>update 2: 3 s, from 16.00 s</title>" in page
    assert not any(outside in page for outside in ("http:", "https:", "src=", "<link"))
    many = [attempt(n, Span("engine 0", n / 1000, n / 1000 + 0.7, 9)) for n in range(10_000)]
    assert page.count("<polygon") == timeline_html(STAGES, many, "many").count("<polygon") + 2
    assert len(timeline_html(STAGES, many, "many")) < 5 * 2 * COLUMNS * 20


def test_the_page_does_without_stages_or_traces():
    assert "trainer</b>" not in timeline_html([], TRACES, "traces")
    assert "engines busy" in timeline_html([], TRACES, "traces")
    assert "<polygon" not in timeline_html(STAGES, [], "stages")
    assert timeline_html([], [], "nothing")
