"""The MLflow run that a spool belongs to: found again or created, then fed events.

Used by the uploader alone: importing this module imports MLflow, which takes seconds. Every call may raise whatever
MLflow raises while its server is away; sending the same events again later is harmless.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from roll_core.tracking.spool import Destination, MetricsLogged, RunEnded

_LOGGER = logging.getLogger(__name__)

_SQLITE = "sqlite:///"
RUN_ID_TAG = "roll.run_id"
STORE_TAG = "roll.store"
_RUNNING = "RUNNING"

_MAX_METRICS = 1000
"""What MLflow's log-batch endpoint takes in one call."""
_MAX_PARAMS_OR_TAGS = 100
"""The same endpoint's limit for params, and for tags."""

_Entity = TypeVar("_Entity", Metric, Param, RunTag)


class MlflowRun:
    """One MLflow run, marked as running from the moment it is opened."""

    def __init__(self, destination: Destination):
        artifact_location = prepare_sqlite_folder(destination.tracking_uri)
        self._client = MlflowClient(tracking_uri=destination.tracking_uri)
        experiment_id = find_or_create_experiment(self._client, destination.experiment, artifact_location)
        self.run_id = _resume_or_create_run(self._client, experiment_id, destination)

    def log_metrics(self, events: Sequence[MetricsLogged]) -> None:
        metrics = [
            Metric(name, value, event.timestamp_ms, event.iteration)
            for event in events
            for name, value in event.metrics.items()
        ]
        for first in range(0, len(metrics), _MAX_METRICS):
            _send(metrics[first : first + _MAX_METRICS], self._send_metrics)

    def log_params(self, params: dict[str, str]) -> None:
        entities = [Param(key, value) for key, value in params.items()]
        for first in range(0, len(entities), _MAX_PARAMS_OR_TAGS):
            _send(entities[first : first + _MAX_PARAMS_OR_TAGS], self._send_params)

    def set_tags(self, tags: dict[str, str]) -> None:
        entities = [RunTag(key, value) for key, value in tags.items()]
        for first in range(0, len(entities), _MAX_PARAMS_OR_TAGS):
            _send(entities[first : first + _MAX_PARAMS_OR_TAGS], self._send_tags)

    def log_artifact(self, name: str, path: Path) -> None:
        """Upload a file, whose name is the last part of `name`, into the folder that the other parts name."""
        folder = str(PurePosixPath(name).parent)
        try:
            self._client.log_artifact(self.run_id, str(path), None if folder == "." else folder)
        except MlflowException as error:
            if not _is_refusal(error):
                raise
            _LOGGER.warning("MLflow refused artifact %s, which is lost: %s", name, error)

    def end(self, event: RunEnded) -> None:
        self._client.set_terminated(self.run_id, event.status.value, event.timestamp_ms)

    def _send_metrics(self, metrics: Sequence[Metric]) -> None:
        self._client.log_batch(self.run_id, metrics=metrics)

    def _send_params(self, params: Sequence[Param]) -> None:
        self._client.log_batch(self.run_id, params=params)

    def _send_tags(self, tags: Sequence[RunTag]) -> None:
        self._client.log_batch(self.run_id, tags=tags)


def _send(entities: list[_Entity], call: Callable[[Sequence[_Entity]], None]) -> None:
    """Send all but what MLflow refuses for good, such as a bad name or another value for a param.

    MLflow refuses a call as a whole, so halving finds the culprit without losing its neighbours.
    """
    try:
        call(entities)
    except MlflowException as error:
        if not _is_refusal(error):
            raise
        if len(entities) == 1:
            _LOGGER.warning("MLflow refused %s=%s, which is lost: %s", entities[0].key, entities[0].value, error)
            return
        half = len(entities) // 2
        _send(entities[:half], call)
        _send(entities[half:], call)


def _is_refusal(error: MlflowException) -> bool:
    """Whether trying again would be in vain. Other codes also stand for a database or a proxy that is unwell."""
    return bool(error.error_code == "INVALID_PARAMETER_VALUE")


def prepare_sqlite_folder(tracking_uri: str) -> str | None:
    """Make the folder of a SQLite database; answers where artifacts go: beside it. A server decides for itself."""
    if not tracking_uri.startswith(_SQLITE):
        return None
    folder = Path(tracking_uri.removeprefix(_SQLITE)).parent
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / "mlartifacts").as_uri()


def find_or_create_experiment(client: MlflowClient, name: str, artifact_location: str | None) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    return str(client.create_experiment(name, artifact_location))


def _resume_or_create_run(client: MlflowClient, experiment_id: str, destination: Destination) -> str:
    """Every leg of a run feeds the same MLflow run."""
    run = find_run(client, experiment_id, destination.run_id, destination.store_uri)
    if run is None:
        tags = {RUN_ID_TAG: destination.run_id, STORE_TAG: destination.store_uri}
        run = client.create_run(experiment_id, tags=tags, run_name=destination.run_id)
    elif run.info.status != _RUNNING:
        client.update_run(run.info.run_id, _RUNNING)
    return str(run.info.run_id)


def find_run(client: MlflowClient, experiment_id: str, run_id: str, store_uri: str) -> Run | None:
    """Run ids are unique in a store, not across stores."""
    found = client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{run_id}'", order_by=["attributes.start_time ASC"])
    return next((run for run in found if run.data.tags.get(STORE_TAG) == store_uri), None)
