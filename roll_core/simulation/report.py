"""Output of `roll simulate`: the machine models, the prediction, and a table of other settings."""

from collections.abc import Iterator, Sequence

from roll_core.planning.plan import PlanSection
from roll_core.reporting.activity import percentiles
from roll_core.simulation.machines import Cost
from roll_core.simulation.simulator import Candidate, MachineModels, Prediction
from roll_core.simulation.workload import Workload

LENGTHS_SHOWN = 2000
"""Number of attempts over which the percentiles of completion lengths are taken."""
HEADER = f"{'seconds':>9}  trainer  engines  staleness  wasted  settings"
"""Header of the table of candidates."""


def describe_machines(models: MachineModels, workload: Workload, origin: str) -> PlanSection:
    """Describe the machine models and the workload; `origin` says where they come from."""
    engine, trainer = models.engine, models.trainer
    tokens = percentiles([float(workload.demand(problem, 0).num_tokens) for problem in range(LENGTHS_SHOWN)])
    grading = percentiles(models.grader.seconds)
    devices = "1 device" if trainer.num_devices == 1 else f"{trainer.num_devices} devices"
    return PlanSection(
        f"machines, {origin}",
        (
            (
                "engine",
                f"{engine.seconds_to_first_token:.3g} s to the first token, {engine.seconds_per_token:.3g} s a token, "
                f"{engine.seconds_per_token_per_running:.2g} s more for each other sequence",
            ),
            ("completions", f"{tokens.p50:,.0f} / {tokens.p90:,.0f} / {tokens.p99:,.0f} tokens (p50 / p90 / p99)"),
            ("grading", f"{grading.p50:.3g} / {grading.p90:.3g} / {grading.p99:.3g} s"),
            ("trainer", f"prepare {_cost(trainer.prepare)}, update {_cost(trainer.update)}, by {devices}"),
            (
                "beside it",
                f"publish {trainer.publish_seconds:.3g} s, evaluate {trainer.evaluate_seconds:.3g} s, "
                f"checkpoint {trainer.checkpoint_seconds:.3g} s, other {trainer.other_seconds:.3g} s",
            ),
        ),
    )


def _cost(cost: Cost) -> str:
    parts = [f"{cost.seconds:.3g} s"] if cost.seconds or not cost.seconds_per_token else []
    parts += [f"{1e3 * cost.seconds_per_token:.3g} s per 1000 tokens"] if cost.seconds_per_token else []
    return " + ".join(parts)


def describe_prediction(prediction: Prediction, measured: float | None) -> PlanSection:
    """Describe a prediction; `measured` is the measured seconds per iteration, if there are any."""
    seconds = f"{prediction.seconds_per_iteration:.3g} s"
    if measured is not None:
        seconds += f", measured {measured:.3g} s ({prediction.seconds_per_iteration / measured - 1:+.0%})"
    return PlanSection(
        f"prediction, over {len(prediction.iteration_seconds)} iterations",
        (
            ("iteration", seconds),
            ("trainer", f"computes {prediction.trainer_busy:.0%} of the time, waits {prediction.bubble:.0%}"),
            (
                "engines",
                f"busy {prediction.engines_busy:.0%} of the time, {prediction.mean_running:.1f} attempts at once each",
            ),
            ("staleness", f"{prediction.staleness_mean:.2g} in the mean, at most {prediction.staleness_max}"),
            ("wasted tokens", f"{prediction.wasted_share:.1%}"),
        ),
    )


def candidate_rows(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield the rows of a table of candidates. The last column can be given to `--set`."""
    yield HEADER
    for candidate in candidates:
        prediction = candidate.prediction
        yield (
            f"{prediction.seconds_per_iteration:>9.3g}  {prediction.trainer_busy:>7.0%}  {prediction.engines_busy:>7.0%}  "
            f"{prediction.staleness_mean:>5.1f} / {prediction.staleness_max:<1}  {prediction.wasted_share:>6.1%}  "
            f"{' '.join(candidate.overrides)}"
        )
