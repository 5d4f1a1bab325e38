"""Tracking against a real MLflow: on SQLite across legs, after a killed leg, and over HTTP through an outage."""

import contextlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from roll_core.config.operations.services import TrackingConfig
from roll_core.host import free_port
from roll_core.tracking.spool import RunStatus, Spool
from roll_core.tracking.tracker import Tracker
from roll_core.types.leg import LegEnding
from roll_core.types.refs import RunRef
from tests.integration.conftest import REHEARSED, UPLOADER, Workspace, upload_once
from tests.support import QUIET_MLFLOW, patience, wait_until

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
RUN = RunRef(run_id="quickstart-3", store_uri="file:///home/ada/roll-data", config_digest="1b4f")
DRAIN_SECONDS = 120.0


def sqlite_config(folder: Path) -> TrackingConfig:
    return TrackingConfig(uri=f"sqlite:///{folder}/data/mlflow.db", experiment="tests", drain_seconds=DRAIN_SECONDS)


def copied_database(folder: Path, database: Path) -> TrackingConfig:
    """Config of a copy of an empty MLflow database: creating its tables takes longer than a test."""
    shutil.copyfile(database, folder / "mlflow.db")
    return TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", experiment="tests", drain_seconds=DRAIN_SECONDS)


def the_only_run(client: MlflowClient) -> Run:
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    return run


def history(client: MlflowClient, run: Run, metric: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric)]


def artifact_text(client: MlflowClient, run: Run, name: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return Path(client.download_artifacts(run.info.run_id, name, str(folder))).read_text()


def test_a_leg_that_can_write_no_log_and_reads_damaged_ones_finishes(workspace: Workspace) -> None:
    """As on a full disk: every file of logs and tracking is replaced by something that cannot be written."""
    run = workspace.open(*REHEARSED)
    folder = workspace.folder / "roll-data/work/tiny-1"
    for name in ("processes.json", "stages.jsonl"):
        (folder / "leg-1" / name / "full").mkdir(parents=True)  # a folder where a file should be
    for name in ("tracking", "flow-runs"):
        (folder / name).touch()  # a file where a folder should be
    (folder / "leg-x").mkdir()
    (folder / "leg-x/stages.jsonl").touch()
    (folder / "leg-0").mkdir()
    (folder / "leg-0/stages.jsonl").write_bytes(b'{"name": "coll\n' + bytes(4096) + b"\n")
    ended = workspace.run_leg(run)
    assert ended.ending is LegEnding.FINISHED, ended.cause
    assert [manifest.iteration for manifest in workspace.chain()] == [0, 1, 2, 3]


def test_two_legs_feed_one_mlflow_run(tmp_path: Path) -> None:
    config = sqlite_config(tmp_path)
    spool_dir = tmp_path / "spool"

    first = Tracker(config, RUN, spool_dir)
    first.start()
    first.log_params({"algorithm.name": "grpo", "seed": "7"})
    first.log_metrics(1, {"reward/mean": 0.25, "update/loss": math.nan, "accuracy@8": 0.5}, NOON)
    first.log_metrics(2, {"reward/mean": 0.5}, NOON)
    first.log_metrics(2, {"reward/mean": 0.5}, NOON)  # by a leg that does not know whether it was logged
    first.log_artifact("manifests/00000002.json", b'{"iteration": 2}')
    first.log_artifact("config.yaml", b"name: quickstart")
    first.set_tags({"roll.leg": "1"})
    first.end(RunStatus.FAILED)
    assert first.close() == 0

    client = MlflowClient(config.uri)
    after_first = the_only_run(client)
    assert after_first.info.status == "FAILED"
    assert after_first.info.run_name == "quickstart-3"
    assert after_first.info.artifact_uri == f"file://{tmp_path}/data/mlartifacts/{after_first.info.run_id}/artifacts"
    # The only thing MLflow refuses, a name with '@', does not take its neighbours along.
    assert history(client, after_first, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert math.isnan(after_first.data.metrics["update/loss"])
    assert "accuracy@8" not in after_first.data.metrics
    assert artifact_text(client, after_first, "manifests/00000002.json", tmp_path / "down") == '{"iteration": 2}'
    assert artifact_text(client, after_first, "config.yaml", tmp_path / "down") == "name: quickstart"
    assert list((spool_dir / "artifacts").iterdir()) == []

    second = Tracker(config, RUN, spool_dir)
    second.start()
    second.log_params({"algorithm.name": "grpo", "seed": "8", "leg": "2"})
    second.log_metrics(3, {"reward/mean": 0.75}, NOON)
    wait_until(lambda: Spool(spool_dir).count_left() == 0, "the second leg is uploaded", DRAIN_SECONDS)
    assert the_only_run(client).info.status == "RUNNING"
    second.set_tags({"roll.leg": "2"})
    second.end(RunStatus.FINISHED)
    assert second.close() == 0

    # As after a crash between an upload and its cursor: everything is sent again, and nothing changes.
    (spool_dir / "cursor.json").unlink()
    assert upload_once(spool_dir) == 0

    run = the_only_run(client)
    assert run.info.run_id == after_first.info.run_id
    assert run.info.status == "FINISHED"
    assert history(client, run, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert len(history(client, run, "update/loss")) == 1
    assert run.data.params == {"algorithm.name": "grpo", "seed": "7", "leg": "2"}
    assert run.data.tags["roll.leg"] == "2"
    assert run.data.tags["roll.store"] == RUN.store_uri


@pytest.mark.parametrize("what", ["run", "experiment"])
def test_events_of_a_deleted_run_are_dropped_with_a_count_and_not_tried_again(
    tmp_path: Path, mlflow_database: Path, what: str
):
    config = copied_database(tmp_path, mlflow_database)
    client, spool = MlflowClient(config.uri), Spool(tmp_path / "spool")
    tracker = Tracker(config, RUN, spool.folder)
    tracker.start()
    tracker.log_metrics(1, {"reward/mean": 0.25}, NOON)
    wait_until(lambda: spool.count_left() == 0, "the first event is uploaded")
    run = the_only_run(client)
    if what == "run":
        client.delete_run(run.info.run_id)
    else:
        client.delete_experiment(run.info.experiment_id)

    tracker.log_metrics(2, {"reward/mean": 0.5, "reward/max": 1.0}, NOON)
    tracker.log_artifact("config.yaml", b"name: quickstart")
    tracker.log_metrics(3, {"reward/mean": 0.5}, NOON)
    tracker.end(RunStatus.FINISHED)
    assert tracker.close() == 0, "none is left for the next leg"
    said = spool.log_file.read_text()
    assert said.count("events of this leg are dropped from here on") == 1
    assert "dropped 4 events" in said
    assert "trying again" not in said

    after = subprocess.run([*UPLOADER, str(spool.folder), "--once"], timeout=patience(120), capture_output=True)
    assert after.returncode == 0
    assert history(client, run, "reward/mean") == [(1, 0.25)]


def test_a_deleted_experiment_is_named_when_a_leg_begins(tmp_path: Path, mlflow_database: Path):
    config = copied_database(tmp_path, mlflow_database)
    client = MlflowClient(config.uri)
    client.delete_experiment(client.create_experiment(config.experiment))
    tracker = Tracker(config, RUN, tmp_path / "spool")
    tracker.start()
    tracker.log_metrics(1, {"reward/mean": 0.25}, NOON)
    assert tracker.close() == 0
    assert "tracking.experiment: 'tests' was deleted in MLflow" in Spool(tmp_path / "spool").log_file.read_text()


def test_a_locked_mlflow_neither_ends_nor_blocks_a_leg(tmp_path: Path, mlflow_database: Path):
    config = copied_database(tmp_path, mlflow_database).model_copy(update={"drain_seconds": 1.0})
    tracker = Tracker(config, RUN, tmp_path / "spool")
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as somebody:
        somebody.execute("BEGIN EXCLUSIVE")
        tracker.start()
        tracker.log_metrics(1, {"reward/mean": 0.25}, NOON)
        tracker.log_artifact("config.yaml", b"name: quickstart")
        tracker.end(RunStatus.FINISHED)
        assert tracker.close() == 3, "all wait in the spool"
    assert upload_once(tmp_path / "spool") == 0
    client = MlflowClient(config.uri)
    assert history(client, the_only_run(client), "reward/mean") == [(1, 0.25)]


def test_a_killed_leg_is_uploaded_to_its_last_event(tmp_path: Path) -> None:
    program = f"""
import os, signal
from datetime import UTC, datetime
from pathlib import Path
from roll_core.config.operations.services import TrackingConfig
from roll_core.tracking.tracker import Tracker
from roll_core.types.refs import RunRef
config = TrackingConfig.model_validate_json({sqlite_config(tmp_path).model_dump_json()!r})
tracker = Tracker(config, RunRef.model_validate_json({RUN.model_dump_json()!r}), Path({str(tmp_path / "spool")!r}))
tracker.start()
tracker.log_metrics(1, {{"reward/mean": 0.25}}, datetime.now(UTC))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=patience(60)).returncode == -signal.SIGKILL
    spool = Spool(tmp_path / "spool")
    wait_until(lambda: spool.read_cursor() > 0, "an orphan uploads", DRAIN_SECONDS)
    client = MlflowClient(sqlite_config(tmp_path).uri)
    assert history(client, the_only_run(client), "reward/mean") == [(1, 0.25)]


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """A server with one worker; its process group is ended with it."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = os.environ | QUIET_MLFLOW
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(address), "the MLflow server answers")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def test_what_is_logged_while_the_server_is_down_arrives_once_it_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    port = free_port()
    config = TrackingConfig(uri=f"http://127.0.0.1:{port}", experiment="tests", drain_seconds=DRAIN_SECONDS)
    spool = Spool(tmp_path / "spool")
    tracker = Tracker(config, RUN, spool.folder)
    tracker.start()
    tracker.log_params({"seed": "7"})
    for iteration in range(1, 251):
        tracker.log_metrics(iteration, {f"area/{number}": float(iteration) for number in range(10)}, NOON)
    tracker.log_artifact("manifests/00000002.json", b'{"iteration": 2}')
    wait_until(lambda: b"Connection refused" in spool.log_file.read_bytes(), "a connection is refused")
    assert spool.count_left() == 252

    with mlflow_server(tmp_path, port) as address:
        tracker.end(RunStatus.FINISHED)
        assert tracker.close() == 0
        client = MlflowClient(address)
        run = the_only_run(client)
        assert run.info.status == "FINISHED"
        assert run.data.params == {"seed": "7"}
        assert history(client, run, "area/3") == [(iteration, float(iteration)) for iteration in range(1, 251)]
        assert artifact_text(client, run, "manifests/00000002.json", tmp_path / "down") == '{"iteration": 2}'
