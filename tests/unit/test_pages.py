"""Tracking of committed iterations: nothing it reads can end a leg, and no commit waits for a page."""

import logging
import threading
import time
from pathlib import Path

import pytest

from flows import train_leg
from roll_core.reporting.stage_log import FILE_NAME, StageLog
from roll_core.store.records.rollouts import encode_trajectories
from roll_core.store.records.runs import find_run, read_chain, read_config
from roll_core.tracking.spool import ArtifactLogged, MetricsLogged, RunEnded, RunStatus, Spool, TrackingEvent
from roll_core.tracking.tracker import Tracker
from roll_core.types.manifest import Collected, CollectRequest, Draws, Evaluated, Manifest, Receipt
from roll_core.types.refs import ArtifactKind
from tasks.leg_time import LegTime
from tasks.services import Services, run_dir
from tasks.tracking import track, track_missed
from tests.stored_runs import StoredRuns
from tests.support import trajectory

LONG_S = 60.0


@pytest.fixture
def services(tmp_path: Path) -> Services:
    """Services of a leg without roles, for a run of two iterations whose stored rollouts are no Parquet."""
    stored = StoredRuns(tmp_path)
    run_id = stored.open(tracking={"uri": None})
    stored.commit(run_id, upto=2)
    run = find_run(stored.store, run_id)
    config = read_config(run)
    folder = run_dir(run, config)
    (folder / "leg-1").mkdir(parents=True)
    tracker = Tracker(config.tracking, run, folder / "tracking")
    leg_time = LegTime(lambda: float("inf"))
    return Services(run, config, 1, stored.store, None, tracker, StageLog(folder / "leg-1"), leg_time)


def last_manifest(services: Services) -> Manifest:
    manifest = read_chain(services.store, services.run.run_id)[-1]
    return manifest.model_copy(update={"committed_at": "2026-11-15T12:00:00+00:00", "metrics": {"reward/mean": 0.5}})


def spooled(services: Services) -> list[TrackingEvent]:
    spool = Spool(run_dir(services.run, services.config) / "tracking")
    return [event.event for event in spool.read(0, max_events=1000).events]


def metrics_in(events: list[TrackingEvent]) -> set[str]:
    return {name for event in events if isinstance(event, MetricsLogged) for name in event.metrics}


def test_rollouts_that_cannot_be_decoded_cost_their_page_only(services: Services, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        track(last_manifest(services), services)
        services.background.close(LONG_S)
    assert {"reward/mean", "goodput/useful_share"} <= metrics_in(spooled(services))
    assert [event.name for event in spooled(services) if isinstance(event, ArtifactLogged)] == ["manifests/00000002.json"]
    assert sum("tracking loses events" in record.getMessage() for record in caplog.records) == 1


def test_a_bad_trace_costs_the_timeline_only(services: Services):
    garbage = services.store.put(b"no Parquet", ArtifactKind.TRACE)
    stored = services.store.put(encode_trajectories([trajectory(0, 0, 1.0)]), ArtifactKind.TRAJECTORIES)
    request = CollectRequest(iteration=2, parent="", weights_version=1, first_problem=0, num_groups=1)
    collected = Collected(
        request=request,
        trajectories=stored,
        num_trajectories=1,
        num_failed=0,
        num_tokens=3,
        draws=Draws(first=0, outcomes="t"),
        trace=garbage,
    )
    evaluated = Evaluated(weights_version=2, num_problems=1, accuracy=1.0, trajectories=stored)
    track(last_manifest(services).model_copy(update={"collected": collected, "evaluated": evaluated}), services)
    services.background.close(LONG_S)
    assert [event.name for event in spooled(services) if isinstance(event, ArtifactLogged)] == [
        "manifests/00000002.json",
        "trajectories/00000002.jsonl",
    ]


def test_a_torn_stage_log_does_not_end_the_start_of_a_leg(services: Services):
    log = run_dir(services.run, services.config) / "leg-1" / FILE_NAME
    log.write_bytes(b'{"name": "coll\n' + bytes(100) + b"\n")
    (run_dir(services.run, services.config) / "leg-x").mkdir()
    track_missed([last_manifest(services)], services)
    services.background.close(LONG_S)
    assert {"reward/mean", "goodput/useful_share"} <= metrics_in(spooled(services))


def test_a_manifest_without_a_time_does_not_end_a_commit(services: Services):
    track(last_manifest(services).model_copy(update={"committed_at": ""}), services)
    services.background.close(LONG_S)


def test_a_commit_and_the_start_of_a_leg_do_not_wait_for_pages(services: Services):
    may_go_on = threading.Event()
    services.background.submit(may_go_on.wait)  # a page that takes for ever
    track(last_manifest(services), services)
    assert metrics_in(spooled(services)) == {"reward/mean"}, "spooled at once; the goodput follows"
    track_missed([last_manifest(services)], services)
    may_go_on.set()
    services.background.close(LONG_S)
    assert "goodput/useful_share" in metrics_in(spooled(services)), "the end of a leg brings the pages up to date"


def test_a_page_that_is_late_does_not_mark_a_finished_run_as_running(services: Services, caplog: pytest.LogCaptureFixture):
    may_go_on, done = threading.Event(), threading.Event()

    def late_page() -> None:
        may_go_on.wait()
        services.tracker.log_artifact("timeline/00000002.html", b"late")
        done.set()

    services.background.submit(late_page)
    services.background.submit(lambda: None)
    with caplog.at_level(logging.WARNING):
        services.background.close(0.01)
    assert "drops" in caplog.text
    services.tracker.end(RunStatus.FINISHED)
    may_go_on.set()
    assert done.wait(LONG_S)
    assert isinstance(spooled(services)[-1], RunEnded)


def test_recovery_is_tracked_and_not_part_of_the_first_iteration(services: Services, monkeypatch: pytest.MonkeyPatch):
    recovered_at = []

    def recover(chain: list[Manifest], services: Services) -> Receipt:
        recovered_at.append(time.monotonic())
        return Receipt(metrics={"recover/replayed_iterations": 1, "recover/exact": 1.0})

    monkeypatch.setattr(train_leg, "recover", recover)
    monkeypatch.setattr(train_leg, "track_missed", lambda *_: None)
    services.leg_time.load_history = lambda chain: None  # these manifests have no timings
    assert train_leg.begin_or_recover(services).iteration == 2
    assert services.iteration_began_at >= recovered_at[0]
    (event,) = [event for event in spooled(services) if isinstance(event, MetricsLogged)]
    assert event.iteration == 2
    assert event.metrics == {"recover/replayed_iterations": 1, "recover/exact": 1.0}
