"""The nightly alarm: accepted runs read from MLflow, a new one measured and judged, the verdict written where people look.

MLflow is imported inside the tasks: whatever else is in this package runs beside training, which never loads it.
"""

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from prefect.artifacts import create_markdown_artifact

from roll_core.config.operations.nightly import ReferenceRun, Tolerances
from roll_core.config.run import RunConfig
from roll_core.reporting.regression import judge, markdown, measure
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, read_chain
from roll_core.types.regression import Measured, Verdict
from tasks.durability import state_changing

if TYPE_CHECKING:
    from roll_core.tracking.baselines import Baselines

ARTIFACT = "nightly-regression"
"""The key under which Prefect keeps one page a night."""


@state_changing("accepted runs of {config.name}")
def read_accepted(config: RunConfig) -> list[Measured]:
    """What a run of a config is to be compared with, the oldest first."""
    return open_baselines(config).accepted(config.name)


@state_changing("judge {run_id}")
def judge_run(
    run_id: str, config: RunConfig, accepted: list[Measured], reference: ReferenceRun, tolerances: Tolerances
) -> Verdict:
    """Measure a finished run, compare it, and keep or reject it as one to compare later runs with."""
    store, baselines = ObjectStore(config.store.uri, config.store.retry_seconds), open_baselines(config)
    run, chain = find_run(store, run_id), read_chain(store, run_id)
    measured = measure(config, chain, baselines.origin(run, chain[-1].code))
    verdict = judge(measured, accepted, reference, tolerances)
    baselines.note(run, measured, verdict, markdown([verdict]), datetime.now(UTC))
    return verdict


@state_changing("report")
def report(verdicts: list[Verdict]) -> None:
    """The page about a night, on the flow run's page."""
    create_markdown_artifact(markdown(verdicts), key=ARTIFACT, description="is anything worse than it was?")


def open_baselines(config: RunConfig) -> "Baselines":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from roll_core.tracking.baselines import Baselines

    return Baselines(config.tracking)
