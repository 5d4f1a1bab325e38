"""Spool and tracker without MLflow: events that are written, events that survive damage, and failures that never reach
training."""

import logging
import math
import resource
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from roll_core.config.operations.services import TrackingConfig
from roll_core.errors import UserError
from roll_core.tracking.spool import (
    ArtifactLogged,
    Destination,
    MetricsLogged,
    ParamsLogged,
    RunEnded,
    RunStatus,
    Spool,
    SpoolWriter,
    TagsSet,
    TrackingEvent,
)
from roll_core.tracking.tracker import Tracker
from roll_core.types.refs import RunRef
from tests.support import wait_until

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
RUN = RunRef(run_id="quickstart-3", store_uri="file:///home/ada/roll-data", config_digest="1b4f")
UNREACHABLE = TrackingConfig(uri="http://127.0.0.1:9", drain_seconds=0.5)
DESTINATION = Destination(
    tracking_uri="http://127.0.0.1:9", experiment="roll", run_id="quickstart-3", store_uri="file:///home/ada/roll-data"
)


def metrics_logged(iteration: int) -> MetricsLogged:
    return MetricsLogged(iteration=iteration, metrics={"reward/mean": 0.25}, timestamp_ms=1000 + iteration)


def write(spool: Spool, events: list[TrackingEvent]) -> None:
    writer = SpoolWriter(spool)
    for event in events:
        writer.append(event)


def read_all(spool: Spool) -> list[TrackingEvent]:
    return [spooled.event for spooled in spool.read(0, max_events=100).events]


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    events: list[TrackingEvent] = [
        metrics_logged(1),
        ArtifactLogged(name="manifests/00000001.json", file="ab/00000001.json"),
        TagsSet(tags={"roll.leg": "1"}),
        ParamsLogged(params={"algorithm.name": "grpo"}),
        RunEnded(status=RunStatus.FINISHED, timestamp_ms=2000),
    ]
    write(Spool(tmp_path), events)
    assert read_all(Spool(tmp_path)) == events


def test_nan_and_infinity_survive(tmp_path: Path) -> None:
    metrics = {"update/loss": math.nan, "update/norm": math.inf, "update/kl": -math.inf}
    write(Spool(tmp_path), [MetricsLogged(iteration=1, metrics=metrics, timestamp_ms=1)])
    [event] = read_all(Spool(tmp_path))
    assert isinstance(event, MetricsLogged)
    assert math.isnan(event.metrics["update/loss"])
    assert (event.metrics["update/norm"], event.metrics["update/kl"]) == (math.inf, -math.inf)


def test_an_incomplete_line_is_left_for_later(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    write(spool, [metrics_logged(1)])
    whole = spool.events_file.stat().st_size
    with spool.events_file.open("ab") as file:
        file.write(b'{"kind":"metrics","itera')
    pending = spool.read(0, max_events=100)
    assert [spooled.event for spooled in pending.events] == [metrics_logged(1)]
    assert (pending.num_damaged, pending.end) == (0, whole)


def test_the_next_leg_loses_only_the_incomplete_line(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    write(spool, [metrics_logged(1)])
    with spool.events_file.open("ab") as file:
        file.write(b'{"kind":"metrics","itera')
    write(spool, [metrics_logged(2)])
    pending = spool.read(0, max_events=100)
    assert [spooled.event for spooled in pending.events] == [metrics_logged(1), metrics_logged(2)]
    assert pending.num_damaged == 1


def test_a_write_cut_short_by_the_disk_costs_that_event_only(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    writer = SpoolWriter(spool)
    writer.append(metrics_logged(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (spool.events_file.stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            writer.append(metrics_logged(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.append(metrics_logged(3))
    assert read_all(spool) == [metrics_logged(1), metrics_logged(3)]


def test_reading_continues_after_the_last_event_read(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    write(spool, [metrics_logged(1), metrics_logged(2), metrics_logged(3)])
    first = spool.read(0, max_events=2)
    assert first.end == first.events[-1].end
    assert [spooled.event for spooled in spool.read(first.end, max_events=2).events] == [metrics_logged(3)]


def test_events_left_are_those_after_the_cursor(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    assert (spool.read_cursor(), spool.count_left()) == (0, 0)
    write(spool, [metrics_logged(1), metrics_logged(2), metrics_logged(3)])
    assert spool.count_left() == 3
    spool.write_cursor(spool.read(0, max_events=1).end)
    assert Spool(tmp_path).count_left() == 2


def test_a_cursor_that_does_not_fit_its_file_starts_over(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    write(spool, [metrics_logged(1)])
    spool.write_cursor(10_000)
    assert spool.read_cursor() == 0


def test_artifacts_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    first, second = spool.put_artifact("samples/a.json", b"1"), spool.put_artifact("samples/a.json", b"2")
    assert spool.artifact_path(first).read_bytes() == b"1"
    assert spool.artifact_path(second).read_bytes() == b"2"
    assert spool.artifact_path(first).name == "a.json"


def test_a_relative_database_is_recorded_as_an_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = Tracker(TrackingConfig(uri="sqlite:///data/mlflow.db"), RUN, Path("spool"))
    tracker.start()
    assert Spool(tmp_path / "spool").read_destination().tracking_uri == f"sqlite:///{tmp_path}/data/mlflow.db"
    assert tracker.close() == 0


def test_an_outage_delays_neither_logging_nor_the_end_of_a_run(tmp_path: Path) -> None:
    tracker = Tracker(UNREACHABLE, RUN, tmp_path)
    tracker.start()
    started = time.monotonic()
    for iteration in range(100):
        tracker.log_metrics(iteration, {"reward/mean": 0.25}, NOON)
    tracker.log_artifact("manifests/00000004.json", b"{}")
    tracker.log_params({"algorithm.name": "grpo"})
    tracker.set_tags({"roll.leg": "1"})
    tracker.end(RunStatus.FAILED)
    assert time.monotonic() - started < 2.0
    wait_until(lambda: b"Connection refused" in Spool(tmp_path).log_file.read_bytes(), "a connection is refused")
    started = time.monotonic()
    assert tracker.close() == 104
    assert time.monotonic() - started < 5.0
    assert tracker.close() == 104


def test_an_uploader_ignores_the_signals_of_its_leg_and_ends_when_asked_to_drain(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write_destination(DESTINATION)
    command = [sys.executable, "-m", "roll_core.tracking.uploader", str(tmp_path), "--drain-seconds", "60"]
    with subprocess.Popen(command) as uploader:
        wait_until(spool.lock_file.exists, "the uploader starts")
        uploader.send_signal(signal.SIGUSR2)
        uploader.send_signal(signal.SIGTERM)
        spool.request_drain(time.time() + 30)
        assert uploader.wait(30) == 0


def test_a_second_uploader_waits_for_the_first(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write_destination(DESTINATION)
    command = [sys.executable, "-m", "roll_core.tracking.uploader", str(tmp_path)]
    with subprocess.Popen(command) as first:
        wait_until(spool.lock_file.exists, "the uploader starts")
        once = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=30)
        assert once.returncode == 1
        assert "another uploader is at work" in once.stderr
        spool.request_drain(time.time() + 30)
        assert first.wait(30) == 0
    assert subprocess.run([*command, "--once"], timeout=30).returncode == 0


def test_a_spool_that_cannot_be_written_is_reported_once_and_never_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    tracker = Tracker(UNREACHABLE, RUN, tmp_path / "file" / "spool")
    with caplog.at_level(logging.WARNING):
        tracker.start()
        for iteration in range(3):
            tracker.log_metrics(iteration, {"reward/mean": 0.25}, NOON)
        tracker.log_artifact("manifests/00000004.json", b"{}")
        tracker.end(RunStatus.FAILED)
    assert sum("loses events" in record.getMessage() for record in caplog.records) == 1
    assert tracker.close() == 5


def test_without_an_address_events_stay_in_the_spool_and_no_uploader_starts(tmp_path: Path) -> None:
    tracker = Tracker(TrackingConfig(uri=None), RUN, tmp_path)
    tracker.start()
    tracker.log_metrics(1, {"reward/mean": 0.25}, NOON)
    tracker.end(RunStatus.FINISHED)
    tracker.close()
    assert len(read_all(Spool(tmp_path))) == 2
    assert not Spool(tmp_path).log_file.exists(), "an uploader was started"


def test_baselines_without_an_address_are_refused() -> None:
    from roll_core.tracking.baselines import Baselines

    with pytest.raises(UserError, match=r"tracking\.uri: null keeps no runs to compare with: name an MLflow address"):
        Baselines(TrackingConfig(uri=None))


def test_a_full_disk_never_raises(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    tracker = Tracker(UNREACHABLE, RUN, tmp_path)
    tracker.log_metrics(1, {"reward/mean": 0.25}, NOON)
    tracker.log_metrics(2, {"reward/mean": 0.25}, NOON)
    assert tracker.close() == 2


def test_the_training_process_does_not_import_mlflow() -> None:
    program = "import sys, roll_core.tracking.tracker; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_damaged_drain_request_is_none(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.request_drain(time.time() + 30)
    (tmp_path / "drain").write_bytes(bytes(20))
    assert spool.drain_deadline() is None


def test_an_error_of_any_kind_within_tracking_is_logged_once_and_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(TrackingConfig(uri=None), RUN, tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with tracker.dropping_errors():
                raise RuntimeError("a bad page")
        tracker.log_metrics(1, {"reward/mean": 0.25}, NOON)
    assert [record.getMessage() for record in caplog.records] == [f"tracking loses events in {tmp_path}: a bad page"]
    assert tracker.close() == 4, "three dropped, and one in the spool, which has no uploader"
