"""Baselines of the nightly alarm: reference runs in MLflow, with their measured quantities and verdict as metrics and tags.

Used by `tasks/nightly.py`, which imports this module inside its tasks because it imports MLflow. The tracking address may be
a SQLite file or a server.
"""

import contextlib
from collections.abc import Iterator
from datetime import datetime
from itertools import takewhile

from mlflow import MlflowClient
from mlflow.entities import Metric, Run, RunTag
from mlflow.exceptions import MlflowException

from roll_core.config.operations.services import TrackingConfig
from roll_core.errors import RollError, UserError
from roll_core.tracking.mlflow_run import RUN_ID_TAG, find_mlflow_run, find_or_create_experiment, prepare_sqlite_folder
from roll_core.tracking.tracker import MACHINE_TAG, VERSIONS_TAG
from roll_core.types.refs import RunRef
from roll_core.types.regression import Measured, Origin, Verdict, learning_settings

_PREFIX = "nightly/"
_REFERENCE, _VERDICT, _REASONS = "roll.nightly.reference", "roll.nightly.verdict", "roll.nightly.reasons"
_CODE, _WEIGHTS, _ERA = "roll.nightly.code", "roll.nightly.weights", "roll.nightly.era"
"""MLflow tags. `_ERA` marks a run that `restart_from` accepted: older runs are no baselines."""
_ACCEPTED, _REJECTED, _BEGINS = "accepted", "rejected", "begins"
_MAX_TAG_CHARACTERS = 5000
"""Longest tag value that MLflow stores."""
_PAGE = 200
"""Runs per search request."""


class Baselines:
    """Baselines of all reference runs that log to one MLflow experiment."""

    def __init__(self, tracking: TrackingConfig):
        if tracking.uri is None:
            raise UserError("tracking.uri: null keeps no runs to compare with: name an MLflow address")
        self._uri = tracking.uri
        with self._reporting_errors():
            artifact_location = prepare_sqlite_folder(self._uri)
            self._client = MlflowClient(tracking_uri=self._uri)
            self._experiment_id = find_or_create_experiment(self._client, tracking.experiment, artifact_location)

    def accepted(self, reference: str) -> list[Measured]:
        """Accepted runs of a reference, oldest first, starting with the newest one passed to `restart_from`."""
        with self._reporting_errors():
            newest_first = list(self._search(reference, _ACCEPTED))
        since = list(takewhile(lambda run: _ERA not in run.data.tags, newest_first))
        return [_measured(run) for run in reversed(newest_first[: len(since) + 1])]

    def origin(self, run: RunRef, code: str) -> Origin:
        """Machine and library versions of a run's last leg, from its MLflow tags, with the given code version."""
        tags = self._find_mlflow_run(run).data.tags
        return Origin(machine=tags.get(MACHINE_TAG, ""), versions=tags.get(VERSIONS_TAG, ""), code=code)

    def record(self, run: RunRef, measured: Measured, verdict: Verdict, page: str, at: datetime) -> None:
        """Write measurements, page and verdict to the MLflow run. The verdict is last: a run without it is no baseline."""
        mlflow_id, timestamp = self._find_mlflow_run(run).info.run_id, int(at.timestamp() * 1000)
        metrics = [Metric(_PREFIX + name, value, timestamp, 0) for name, value in measured.quantities.items()]
        tags = {
            _REFERENCE: measured.reference,
            _CODE: measured.origin.code,
            _WEIGHTS: " ".join(measured.weights),
            _REASONS: "; ".join(verdict.reasons)[:_MAX_TAG_CHARACTERS] or "none",
        }
        with self._reporting_errors():
            self._client.log_batch(mlflow_id, metrics=metrics, tags=[RunTag(key, value) for key, value in tags.items()])
            self._client.log_text(mlflow_id, page, "nightly.md")
            self._client.set_tag(mlflow_id, _VERDICT, _REJECTED if verdict.is_regression else _ACCEPTED)

    def restart_from(self, run: RunRef) -> None:
        """Accept a judged run, whatever its verdict, and compare later runs with it and its successors only."""
        tracked = self._find_mlflow_run(run)
        if _VERDICT not in tracked.data.tags:
            raise UserError(f"--accept: {run.run_id} was not judged by a nightly flow: name one that was")
        with self._reporting_errors():
            self._client.set_tag(tracked.info.run_id, _ERA, _BEGINS)
            self._client.set_tag(tracked.info.run_id, _VERDICT, _ACCEPTED)

    def _search(self, reference: str, verdict: str) -> Iterator[Run]:
        """Yield the MLflow runs of a reference that have this verdict, newest first."""
        condition = f"tags.`{_REFERENCE}` = '{reference}' and tags.`{_VERDICT}` = '{verdict}'"
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id],
                condition,
                max_results=_PAGE,
                order_by=["attributes.start_time DESC"],
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                return

    def _find_mlflow_run(self, run: RunRef) -> Run:
        """Find the MLflow run of a run. Raises RollError if it was never uploaded."""
        with self._reporting_errors():
            found = find_mlflow_run(self._client, self._experiment_id, run.run_id, run.store_uri)
        if found is None:
            raise RollError(
                f"tracking: {run.run_id} has not arrived at MLflow ({self._uri}), so it cannot be judged: "
                "see uploader.log in the run's tracking folder"
            )
        return found

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Turn errors of MLflow into a RollError that names `tracking.uri`."""
        try:
            yield
        except (MlflowException, OSError) as error:
            said = " ".join(str(error).split())[:200]
            raise RollError(f"tracking.uri: MLflow at {self._uri} does not answer as it should ({said})") from error


def _measured(run: Run) -> Measured:
    """Read back from an MLflow run what `Baselines.record` wrote."""
    tags = run.data.tags
    metrics = {name: value for name, value in run.data.metrics.items() if name.startswith(_PREFIX)}
    return Measured(
        reference=tags[_REFERENCE],
        run_id=tags[RUN_ID_TAG],
        quantities={name.removeprefix(_PREFIX): value for name, value in metrics.items()},
        settings=learning_settings(run.data.params),
        origin=Origin(machine=tags.get(MACHINE_TAG, ""), versions=tags.get(VERSIONS_TAG, ""), code=tags[_CODE]),
        weights=tuple(tags[_WEIGHTS].split()),
    )
