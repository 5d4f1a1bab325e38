"""Every night: are the small reference runs as good and as fast as they were? A regression fails the flow run."""

from prefect import flow, get_run_logger

from flows.rlvr import rlvr
from roll_core.config.load import load_config, load_nightly
from roll_core.config.operations.nightly import ReferenceRun, Tolerances
from roll_core.errors import RegressionFound, RollError, UserError
from roll_core.reporting.regression import is_only_slower, sentence
from roll_core.types.regression import Verdict
from tasks.nightly import judge_run, read_accepted, report

WAIT_FOR_MLFLOW = "tracking.drain_seconds=300"
"""A run that has not arrived at MLflow cannot be judged, and there is no next leg that could upload the rest."""


@flow(name="nightly")
def nightly(config: str = "configs/nightly.yaml", overrides: list[str] | None = None) -> list[Verdict]:
    """Train every reference, judge it by the accepted runs of the nights before, and fail if one is worse.

    Overrides are for all references: where a site has its store and its MLflow.
    """
    plan = load_nightly(config)
    verdicts = [examine(reference, plan.tolerances, overrides or []) for reference in plan.references]
    report(verdicts)
    if any(verdict.is_regression for verdict in verdicts):
        raise RegressionFound("\n".join(map(sentence, verdicts)))
    return verdicts


def examine(reference: ReferenceRun, tolerances: Tolerances, overrides: list[str]) -> Verdict:
    """A reference's verdict of tonight. One that is only slower is trained once more, and what is then found holds: a busy
    machine seldom is so twice, slower code always is."""
    verdict = train_and_judge(reference, tolerances, overrides)
    if not is_only_slower(verdict):
        return verdict
    get_run_logger().warning("%s; training it once more", sentence(verdict))
    return train_and_judge(reference, tolerances, overrides)


def train_and_judge(reference: ReferenceRun, tolerances: Tolerances, overrides: list[str]) -> Verdict:
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
    get_run_logger().info(sentence(verdict))
    return verdict
