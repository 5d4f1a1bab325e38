"""Accepted runs in a real MLflow, in a file and behind a server: what was noted comes back, what was rejected does not."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from roll_core.config.operations.services import TrackingConfig
from roll_core.errors import RollError, UserError
from roll_core.host import free_port
from roll_core.tracking.baselines import Baselines
from roll_core.tracking.mlflow_run import MlflowRun
from roll_core.tracking.spool import Destination, RunEnded, RunStatus
from roll_core.tracking.tracker import MACHINE_TAG, VERSIONS_TAG
from roll_core.types.refs import RunRef
from roll_core.types.regression import Measured, Origin, Verdict
from tests.integration.test_tracking_mlflow import mlflow_server

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
ORIGIN = Origin(machine="EPYC, 2 CPUs", versions="torch 2.13.0", code="0.2.0+aaaa")


@pytest.fixture(params=["sqlite", "http"])
def tracking(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackingConfig]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if request.param == "sqlite":
        yield TrackingConfig(uri=f"sqlite:///{tmp_path}/data/mlflow.db", experiment="tests")
        return
    with mlflow_server(tmp_path, free_port()) as address:
        yield TrackingConfig(uri=address, experiment="tests")


def ref(number: int) -> RunRef:
    return RunRef(run_id=f"quickstart-{number}", store_uri="file:///home/ada/store", config_digest="1b4f")


def train(number: int, tracking: TrackingConfig) -> None:
    """A finished run, as the uploader leaves it."""
    destination = Destination(
        tracking_uri=tracking.uri, experiment="tests", run_id=ref(number).run_id, store_uri=ref(number).store_uri
    )
    run = MlflowRun(destination)
    run.log_params({"seed": "0", "store.uri": "file:///home/ada/store"})
    run.set_tags({MACHINE_TAG: ORIGIN.machine, VERSIONS_TAG: ORIGIN.versions})
    run.end(RunEnded(status=RunStatus.FINISHED, timestamp_ms=1))


def measured(number: int) -> Measured:
    return Measured(
        reference="quickstart",
        run_id=f"quickstart-{number}",
        quantities={"accuracy/last": 0.9 + number / 100, "seconds/update": 0.25},
        settings={"seed": "0"},
        origin=ORIGIN,
        weights=("77d0a3f1", f"0000000{number}"),
    )


def note(baselines: Baselines, number: int, *defects: str) -> None:
    verdict = Verdict(reference="quickstart", run_id=f"quickstart-{number}", defects=defects)
    baselines.record(ref(number), measured(number), verdict, "a page", NOON + timedelta(days=number))


def test_accepted_runs_come_back_as_they_were_noted(tracking):
    for number in (1, 2, 3, 4):
        train(number, tracking)
    baselines = Baselines(tracking)
    assert baselines.accepted("quickstart") == []
    assert baselines.origin(ref(1), "0.2.0+aaaa") == ORIGIN
    note(baselines, 1)
    note(baselines, 2, "accuracy/last is 0.1")
    note(baselines, 3)
    assert baselines.accepted("quickstart") == [measured(1), measured(3)], "what was rejected is not among them"
    assert baselines.accepted("quickstart-ppo") == []
    with pytest.raises(UserError, match="quickstart-4 was not judged by a nightly flow"):
        baselines.restart_from(ref(4))
    baselines.restart_from(ref(2))
    note(baselines, 4)
    assert baselines.accepted("quickstart") == [measured(2), measured(3), measured(4)], (
        "what was begun before it is not compared with"
    )
    with pytest.raises(RollError, match="quickstart-9 has not arrived at MLflow"):
        baselines.origin(ref(9), "")
