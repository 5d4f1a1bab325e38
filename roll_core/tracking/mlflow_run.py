"""MLflow run that a spool belongs to: found or created, then fed events.

Used by the uploader and the baselines only, because importing this module imports MLflow, which takes seconds. Every call
may raise any exception of MLflow while its server is down. Sending an event is idempotent: it can be repeated later. Only
MlflowDeleted is final: someone deleted the run or its experiment.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from roll_core.tracking.spool import Destination, MetricsLogged, MlflowDeleted, RunEnded

_LOGGER = logging.getLogger(__name__)

_SQLITE = "sqlite:///"
RUN_ID_TAG = "roll.run_id"
STORE_TAG = "roll.store"
_RUNNING = "RUNNING"

_MAX_METRICS = 1000
"""Most metrics in one call of MLflow's log-batch endpoint."""
_MAX_PARAMS_OR_TAGS = 100
"""Most params, and most tags, in one call of MLflow's log-batch endpoint."""

_Entity = TypeVar("_Entity", Metric, Param, RunTag)


class MlflowRun:
    """MLflow run of a destination. Opening it finds or creates the run and marks it as running."""

    def __init__(self, destination: Destination):
        artifact_location = prepare_sqlite_folder(destination.tracking_uri)
        self._client = MlflowClient(tracking_uri=destination.tracking_uri)
        experiment_id = find_or_create_experiment(self._client, destination.experiment, artifact_location)
        self.run_id = _resume_or_create_run(self._client, experiment_id, destination)

    def log_metrics(self, events: Sequence[MetricsLogged]) -> None:
        """Send metrics, with the event's iteration as step and its timestamp."""
        metrics = [
            Metric(name, value, event.timestamp_ms, event.iteration)
            for event in events
            for name, value in event.metrics.items()
        ]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._send(metrics[first : first + _MAX_METRICS], self._send_metrics)

    def log_params(self, params: dict[str, str]) -> None:
        """Send params. MLflow refuses to change the value of a param: then the first value stays."""
        entities = [Param(key, value) for key, value in params.items()]
        for first in range(0, len(entities), _MAX_PARAMS_OR_TAGS):
            self._send(entities[first : first + _MAX_PARAMS_OR_TAGS], self._send_params)

    def set_tags(self, tags: dict[str, str]) -> None:
        entities = [RunTag(key, value) for key, value in tags.items()]
        for first in range(0, len(entities), _MAX_PARAMS_OR_TAGS):
            self._send(entities[first : first + _MAX_PARAMS_OR_TAGS], self._send_tags)

    def log_artifact(self, name: str, path: Path) -> None:
        """Upload a file as the artifact `name`, which may contain folders. Its last part must be the file's own name."""
        folder = str(PurePosixPath(name).parent)
        try:
            self._client.log_artifact(self.run_id, str(path), None if folder == "." else folder)
        except MlflowException as error:
            self._raise_if_deleted(error)
            if not _is_refusal(error):
                raise
            _LOGGER.warning("MLflow refused artifact %s, which is lost: %s", name, error)

    def end(self, event: RunEnded) -> None:
        """Mark the MLflow run as ended, with the event's status and time."""
        try:
            self._client.set_terminated(self.run_id, event.status.value, event.timestamp_ms)
        except MlflowException as error:
            self._raise_if_deleted(error)
            raise

    def _send(self, entities: list[_Entity], call: Callable[[Sequence[_Entity]], None]) -> None:
        """Send entities; drop and log those that MLflow refuses for good, such as a bad name or a changed param.

        MLflow refuses a call as a whole. Bisection finds the refused entity without losing the others.
        """
        try:
            call(entities)
        except MlflowException as error:
            self._raise_if_deleted(error)
            if not _is_refusal(error):
                raise
            if len(entities) == 1:
                _LOGGER.warning("MLflow refused %s=%s, which is lost: %s", entities[0].key, entities[0].value, error)
                return
            half = len(entities) // 2
            self._send(entities[:half], call)
            self._send(entities[half:], call)

    def _raise_if_deleted(self, error: MlflowException) -> None:
        """Raise MlflowDeleted if MLflow refused because the run is deleted, which the error code alone does not say."""
        if _is_refusal(error) and self._client.get_run(self.run_id).info.lifecycle_stage == LifecycleStage.DELETED:
            raise MlflowDeleted(f"the MLflow run {self.run_id} was deleted: restore it to track this run") from error

    def _send_metrics(self, metrics: Sequence[Metric]) -> None:
        self._client.log_batch(self.run_id, metrics=metrics)

    def _send_params(self, params: Sequence[Param]) -> None:
        self._client.log_batch(self.run_id, params=params)

    def _send_tags(self, tags: Sequence[RunTag]) -> None:
        self._client.log_batch(self.run_id, tags=tags)


def _is_refusal(error: MlflowException) -> bool:
    """True if MLflow refused the content, so that a retry is useless. Other codes may mean a failing database or proxy."""
    return bool(error.error_code == "INVALID_PARAMETER_VALUE")


def prepare_sqlite_folder(tracking_uri: str) -> str | None:
    """Create the folder of a SQLite database; returns the artifact location beside it. None for a server."""
    if not tracking_uri.startswith(_SQLITE):
        return None
    folder = Path(tracking_uri.removeprefix(_SQLITE)).parent
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / "mlartifacts").as_uri()


def find_or_create_experiment(client: MlflowClient, name: str, artifact_location: str | None) -> str:
    """Return the id of an experiment, created if missing. Raise MlflowDeleted if it was deleted."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None and experiment.lifecycle_stage == LifecycleStage.DELETED:
        raise MlflowDeleted(f"tracking.experiment: '{name}' was deleted in MLflow: restore it there, or name another one")
    if experiment is not None:
        return str(experiment.experiment_id)
    return str(client.create_experiment(name, artifact_location))


def _resume_or_create_run(client: MlflowClient, experiment_id: str, destination: Destination) -> str:
    """Return the id of the MLflow run that all legs of a run share, created if missing, and mark it as running."""
    run = find_mlflow_run(client, experiment_id, destination.run_id, destination.store_uri)
    if run is None:
        tags = {RUN_ID_TAG: destination.run_id, STORE_TAG: destination.store_uri}
        run = client.create_run(experiment_id, tags=tags, run_name=destination.run_id)
    elif run.info.status != _RUNNING:
        client.update_run(run.info.run_id, _RUNNING)
    return str(run.info.run_id)


def find_mlflow_run(client: MlflowClient, experiment_id: str, run_id: str, store_uri: str) -> Run | None:
    """Find the MLflow run of a run, by run id and store: run ids are unique only within a store. None if missing."""
    found = client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{run_id}'", order_by=["attributes.start_time ASC"])
    return next((run for run in found if run.data.tags.get(STORE_TAG) == store_uri), None)
