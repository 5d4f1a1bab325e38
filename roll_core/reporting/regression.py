"""Regression detection: measure a finished run, compare it with accepted runs, and describe the verdict.

Pure functions. `flows/nightly.py` trains the runs; `tracking/baselines.py` stores the accepted ones.

Learning is compared with every accepted run of the reference, whatever its code, libraries or defaults: a change that learns
worse is what the alarm looks for. Speed is compared with runs on the same kind of machine. Only worse values are a
regression. Runs with equal settings, code, libraries and machine must be bit-identical, which needs no statistics.
"""

import math
from collections.abc import Sequence
from statistics import fmean, median

from roll_core.config.operations.nightly import ReferenceRun, Tolerances
from roll_core.config.run import RunConfig, flat_config
from roll_core.types.manifest import Manifest, Metrics
from roll_core.types.regression import Comparison, ComparisonOutcome, Measured, Origin, Verdict, learning_settings

DIGEST_DIGITS = 8
"""Leading digits kept of each weights digest."""
MAX_DIGESTS = 500
"""Most shortened digests that fit into one MLflow tag."""
MAD_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""
SMALL_SAMPLE_CORRECTION = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""Factor that corrects the median absolute deviation of n values (Croux and Rousseeuw 1992); n / (n - 0.8) for more."""
SHOWN_KEYS = 8
"""Most changed settings that a verdict names; a new section of the config changes dozens."""


def measure_run(config: RunConfig, chain: Sequence[Manifest], origin: Origin) -> Measured:
    """Measure a finished run: its learning and speed quantities, settings, origin and weights digests."""
    return Measured(
        reference=config.name,
        run_id=chain[-1].run_id,
        quantities=_learning(chain) | _speed(chain),
        settings=learning_settings(flat_config(config)),
        origin=origin,
        weights=tuple(manifest.weights_digest[:DIGEST_DIGITS] for manifest in chain[:MAX_DIGESTS]),
    )


def _learning(chain: Sequence[Manifest]) -> Metrics:
    """Learning quantities: the final reward and accuracy, and their means over the run, which show how fast it learned."""
    rewards = [m.metrics["reward/mean"] for m in chain if m.collected is not None]
    accuracies = [m.evaluated.accuracy for m in chain if m.evaluated is not None and m.iteration > 0]
    last_quarter = rewards[-max(1, len(rewards) // 4) :]
    return {
        "reward/last": fmean(last_quarter),
        "reward/mean": fmean(rewards),
        "accuracy/last": accuracies[-1],
        "accuracy/mean": fmean(accuracies),
    }


def _speed(chain: Sequence[Manifest]) -> Metrics:
    """Speed quantities: medians over iterations, which ignore a disturbance of some.

    The first iteration is left out, because it allocates and compiles.
    """
    trained = [m for m in chain if m.collected is not None]
    steady = trained[1:] or trained
    stages = sorted({stage for manifest in steady for stage in manifest.timings})
    seconds = {f"seconds/{stage}": median(m.timings[stage] for m in steady if stage in m.timings) for stage in stages}
    return {"throughput/tokens_per_second": median(m.metrics["throughput/tokens_per_second"] for m in steady)} | seconds


def judge(measured: Measured, accepted: Sequence[Measured], reference: ReferenceRun, tolerances: Tolerances) -> Verdict:
    """Compare a run with the accepted runs, which are sorted oldest first."""
    comparisons = [
        comparison
        for quantity in _quantities(measured, accepted)
        for comparison in compare_with_baselines(quantity, measured, accepted, tolerances)
    ]
    return Verdict(
        reference=measured.reference,
        run_id=measured.run_id,
        comparisons=tuple(comparisons),
        defects=(
            *(f"{name} is {value}" for name, value in measured.quantities.items() if not math.isfinite(value)),
            *_below_fixed_limits(measured, reference),
            *_reproducibility_failure(measured, accepted, reference),
        ),
        remarks=tuple(_changes(measured, accepted[-1])) if accepted else ("the first run of this reference",),
    )


def _quantities(measured: Measured, accepted: Sequence[Measured]) -> list[str]:
    """Names of the quantities to compare: those of the run, and the learning quantities of the newest accepted run.

    A learning quantity that is no longer measured must not pass unnoticed.
    """
    had = {name for name in accepted[-1].quantities if not is_speed(name)} if accepted else set()
    return sorted(measured.quantities.keys() | had)


def is_speed(quantity: str) -> bool:
    """True if a quantity measures speed, else it measures learning."""
    return quantity.startswith(("seconds/", "throughput/"))


def is_only_slower(verdict: Verdict) -> bool:
    """True if a run is a regression by speed alone, which a busy machine can cause, too."""
    return verdict.is_regression and not verdict.defects and all(is_speed(found.quantity) for found in verdict.worse)


def compare_with_baselines(
    quantity: str, measured: Measured, accepted: Sequence[Measured], tolerances: Tolerances
) -> list[Comparison]:
    """Compare a quantity with the newest accepted runs and, to notice drift, with the oldest if there are more.

    Too few comparable runs give one comparison with outcome NOT_JUDGED.
    """
    machine = measured.origin.machine
    comparable = [run for run in accepted if not is_speed(quantity) or run.origin.machine == machine]
    values = [run.quantities[quantity] for run in comparable if quantity in run.quantities]
    value = measured.quantities.get(quantity)
    needed = tolerances.speed_baselines if is_speed(quantity) else 1
    if len(values) < needed:
        where = " on this kind of machine" if is_speed(quantity) else ""
        too_few = f"with {len(values)} accepted runs{where} of {needed} needed to judge it"
        return [Comparison(quantity=quantity, value=value, against=too_few, outcome=ComparisonOutcome.NOT_JUDGED)]
    recent, oldest = values[-tolerances.recent :], values[: tolerances.oldest]
    found = [compare(quantity, value, recent, f"the last {len(recent)}", tolerances)]
    if len(values) > len(oldest):
        found.append(compare(quantity, value, oldest, f"the first {len(oldest)}", tolerances))
    return found


def compare(
    quantity: str, value: float | None, accepted: Sequence[float], against: str, tolerances: Tolerances
) -> Comparison:
    """Compare a value with those of accepted runs, by their median and spread. A missing value or NaN is worse."""
    centre = median(accepted)
    tolerated = max(tolerances.sigmas * robust_sigma(accepted), noise_floor(quantity, centre, tolerances))
    gain = math.nan if value is None else (centre - value if quantity.startswith("seconds/") else value - centre)
    if gain > tolerated:
        outcome = ComparisonOutcome.BETTER
    elif gain >= -tolerated:
        outcome = ComparisonOutcome.AS_BEFORE
    else:  # also if gain is NaN
        outcome = ComparisonOutcome.WORSE
    return Comparison(quantity=quantity, value=value, against=against, centre=centre, tolerated=tolerated, outcome=outcome)


def robust_sigma(values: Sequence[float]) -> float:
    """Standard deviation estimated from the median absolute deviation, which tolerates outliers in half of the values.

    Example: of 10, 11, 12, 13, 90 the deviations from 12 are 2, 1, 0, 1, 78; their median 1 is worth 1.4826 * 1.206.
    """
    count = len(values)
    if count < 2:
        return 0.0
    centre = median(values)
    correction = SMALL_SAMPLE_CORRECTION.get(count, count / (count - 0.8))
    return correction * MAD_TO_SIGMA * median(abs(value - centre) for value in values)


def noise_floor(quantity: str, centre: float, tolerances: Tolerances) -> float:
    """Smallest tolerance of a quantity: a smaller distance from the median is noise, however similar accepted runs are."""
    match quantity.partition("/")[0]:
        case "accuracy":
            return tolerances.accuracy
        case "reward":
            return tolerances.reward
        case "seconds":
            return max(tolerances.seconds, tolerances.speed * centre)
        case _:
            return tolerances.speed * centre


def _below_fixed_limits(measured: Measured, reference: ReferenceRun) -> list[str]:
    """Describe the quantities below the reference's `at_least`; a missing one counts as below."""
    values = {name: measured.quantities.get(name, math.nan) for name in reference.at_least}
    return [
        f"{name} is {values[name]:.4g}, at least {limit:.4g} is expected"
        for name, limit in reference.at_least.items()
        if not values[name] >= limit
    ]


def _reproducibility_failure(measured: Measured, accepted: Sequence[Measured], reference: ReferenceRun) -> list[str]:
    """Describe where the weights leave those of the newest accepted run with equal settings and origin, if they do."""
    twins = [run for run in accepted if run.settings == measured.settings and run.origin == measured.origin]
    if not reference.reproducible or not twins or twins[-1].weights == measured.weights:
        return []
    where = _first_difference(measured.weights, twins[-1].weights)
    return [
        f"weights differ from those of {twins[-1].run_id} {where}, though config, code, libraries and machine are the same"
    ]


def _changes(measured: Measured, before: Measured) -> list[str]:
    """Describe how weights, origin and settings differ from those of the newest accepted run."""
    remarks = []
    if measured.weights == before.weights:
        remarks.append(f"the weights of {before.run_id}, to the bit")
    else:
        remarks.append(f"weights part from those of {before.run_id} {_first_difference(measured.weights, before.weights)}")
    for field in Origin.model_fields:
        old, new = getattr(before.origin, field), getattr(measured.origin, field)
        if old != new:
            remarks.append(f"{field}: {old} -> {new}")
    keys = sorted(measured.settings.keys() | before.settings.keys())
    changed = [
        f"{key}: {before.settings.get(key, 'not there')} -> {measured.settings.get(key, 'not there')}"
        for key in keys
        if before.settings.get(key) != measured.settings.get(key)
    ]
    rest = [f"and {len(changed) - SHOWN_KEYS} more settings"] if len(changed) > SHOWN_KEYS else []
    return [*remarks, *changed[:SHOWN_KEYS], *rest]


def _first_difference(weights: Sequence[str], others: Sequence[str]) -> str:
    """First iteration whose weights differ, in words. Example: from iteration 12 on"""
    pairs = zip(weights, others, strict=False)
    first = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(weights), len(others)))
    return f"from iteration {first} on"


def verdicts_page(verdicts: Sequence[Verdict]) -> str:
    """Render the verdicts of a night as a Markdown page."""
    return "\n\n".join(_section(verdict) for verdict in verdicts) + "\n"


def _section(verdict: Verdict) -> str:
    heading = f"## {verdict.reference}: {'regression' if verdict.is_regression else 'accepted'} ({verdict.run_id})"
    reasons = "\n".join(f"- **{reason}**" for reason in verdict.reasons)
    remarks = "\n".join(f"- {remark}" for remark in verdict.remarks)
    rows = [
        f"| {c.quantity} | {_number(c.value)} | {_number(c.centre)} | {_number(c.tolerated)} | {c.against} | {c.outcome} |"
        for c in verdict.comparisons
    ]
    table = "\n".join(["| quantity | this run | median | tolerated | of | |", "|---|---|---|---|---|---|", *rows])
    return "\n\n".join(part for part in (heading, reasons, remarks, table if rows else "") if part)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def verdict_sentence(verdict: Verdict) -> str:
    """Describe a verdict in one sentence.

    Example: quickstart-12: regression: accuracy/last is 0.71, the median of the last 12 accepted runs 0.96, ...
    """
    if verdict.is_regression:
        return f"{verdict.run_id}: regression: {'; '.join(verdict.reasons)}"
    judged = [c for c in verdict.comparisons if c.outcome is not ComparisonOutcome.NOT_JUDGED]
    return f"{verdict.run_id}: accepted; {len(judged)} comparisons, none worse; {verdict.remarks[0]}"
