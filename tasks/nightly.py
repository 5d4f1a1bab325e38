"""Tasks of the nightly regression check: read the accepted runs from MLflow, judge a new run, and report the verdict.

Used by `flows/nightly.py`. MLflow is imported inside the functions: the rest of this package runs in training processes,
which never load it.
"""

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from prefect.artifacts import create_markdown_artifact

from roll_core.config.operations.nightly import ReferenceRun, Tolerances
from roll_core.config.run import RunConfig
from roll_core.reporting.regression import judge, measure_run, verdicts_page
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, read_chain
from roll_core.types.regression import Measured, Verdict
from tasks.durability import state_changing

if TYPE_CHECKING:
    from roll_core.tracking.baselines import Baselines

ARTIFACT = "nightly-regression"
"""Key of the Prefect artifact that holds the report of each night."""


@state_changing("accepted runs of {config.name}")
def read_accepted(config: RunConfig) -> list[Measured]:
    """Read the accepted runs of a config's reference from MLflow, the oldest first."""
    return open_baselines(config).accepted(config.name)


@state_changing("judge {run_id}")
def judge_run(
    run_id: str, config: RunConfig, accepted: list[Measured], reference: ReferenceRun, tolerances: Tolerances
) -> Verdict:
    """Measure a finished run, compare it with the accepted runs, and record the verdict in MLflow.

    Later runs are compared with this run too, unless the verdict is a regression.
    """
    store, baselines = ObjectStore(config.store.uri, config.store.retry_seconds), open_baselines(config)
    run, chain = find_run(store, run_id), read_chain(store, run_id)
    measured = measure_run(config, chain, baselines.origin(run, chain[-1].code))
    verdict = judge(measured, accepted, reference, tolerances)
    baselines.record(run, measured, verdict, verdicts_page([verdict]), datetime.now(UTC))
    return verdict


@state_changing("report")
def report(verdicts: list[Verdict]) -> None:
    """Publish the verdicts of a night as a Markdown artifact of the Prefect flow run."""
    create_markdown_artifact(verdicts_page(verdicts), key=ARTIFACT, description="is anything worse than it was?")


def open_baselines(config: RunConfig) -> "Baselines":
    """Open the accepted runs in the MLflow server of a config."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from roll_core.tracking.baselines import Baselines

    return Baselines(config.tracking)
