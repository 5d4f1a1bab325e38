"""Flow `nightly`: train small reference runs, and fail if one learns worse or runs slower than earlier accepted runs."""

from prefect import flow, get_run_logger

from flows.rlvr import rlvr
from roll_core.config.load import load_config, load_nightly
from roll_core.config.operations.nightly import ReferenceRun, Tolerances
from roll_core.errors import RegressionFound, RollError, UserError
from roll_core.reporting.regression import is_only_slower, verdict_sentence
from roll_core.types.regression import Verdict
from tasks.nightly import judge_run, read_accepted, report

WAIT_FOR_MLFLOW = "tracking.drain_seconds=300"
"""Override that makes a run wait up to 300 seconds for its upload to MLflow. A run is judged by what is in MLflow, and a
finished run has no next leg that would upload the rest."""


@flow(name="nightly")
def nightly(config: str = "configs/nightly.yaml", overrides: list[str] | None = None) -> list[Verdict]:
    """Train every reference run, judge it against the accepted runs of earlier nights, and fail if one is worse.

    `overrides` apply to all references, for example the URIs of a site's store and MLflow server.
    """
    plan = load_nightly(config)
    verdicts = [judge_reference(reference, plan.tolerances, overrides or []) for reference in plan.references]
    report(verdicts)
    if any(verdict.is_regression for verdict in verdicts):
        raise RegressionFound("\n".join(map(verdict_sentence, verdicts)))
    return verdicts


def judge_reference(reference: ReferenceRun, tolerances: Tolerances, overrides: list[str]) -> Verdict:
    """Train and judge a reference run. If it is only slower, repeat that once and return the second verdict.

    A busy machine is seldom slow twice; slower code always is.
    """
    verdict = train_and_judge(reference, tolerances, overrides)
    if not is_only_slower(verdict):
        return verdict
    get_run_logger().warning("%s; training it once more", verdict_sentence(verdict))
    return train_and_judge(reference, tolerances, overrides)


def train_and_judge(reference: ReferenceRun, tolerances: Tolerances, overrides: list[str]) -> Verdict:
    """Train a reference run and judge it. A run that does not finish is a regression."""
    settings = [WAIT_FOR_MLFLOW, *reference.overrides, *overrides]
    config = load_config(reference.config, settings)
    accepted = read_accepted(config)
    try:
        run_id = rlvr(reference.config, settings).run_id
    except UserError:
        raise
    except RollError as error:
        return Verdict(reference=config.name, run_id=config.name, defects=(f"training did not finish: {error}",))
    verdict = judge_run(run_id, config, accepted, reference, tolerances)
    get_run_logger().info(verdict_sentence(verdict))
    return verdict
