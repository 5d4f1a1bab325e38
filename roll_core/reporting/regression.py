"""Is a run worse than those before it? What is measured of a run, how that is judged, and how it is told.

Pure functions; `flows/nightly.py` trains runs, `tracking/baselines.py` keeps the accepted ones.

Learning is compared with every accepted run of the reference, whatever made it: new code, libraries or defaults that learn
worse are what is looked for. Speed is compared with runs on the same kind of machine. Only worse is bad. What should repeat
to the bit (same settings, code, libraries, machine) is held to that, and needs no statistics.
"""

import math
from collections.abc import Sequence
from statistics import fmean, median

from roll_core.config.operations.nightly import ReferenceRun, Tolerances
from roll_core.config.run import RunConfig, flat_config
from roll_core.types.manifest import Manifest, Metrics
from roll_core.types.regression import Comparison, ComparisonOutcome, Measured, Origin, Verdict, settings_of

DIGITS_OF_DIGEST = 8
MAX_DIGESTS = 500
"""So many beginnings fit into one MLflow tag."""
MAD_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution is 1 / 1.4826 of its standard deviation."""
SMALL_SAMPLES = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""By which the deviation of so few is too small (Croux and Rousseeuw 1992); n / (n - 0.8) for more."""
SHOWN_KEYS = 8
"""Changed settings that are named; a new section of the config changes dozens."""


def measure(config: RunConfig, chain: Sequence[Manifest], origin: Origin) -> Measured:
    """What the alarm looks at, of a finished run."""
    return Measured(
        reference=config.name,
        run_id=chain[-1].run_id,
        quantities=_learning(chain) | _speed(chain),
        settings=settings_of(flat_config(config)),
        origin=origin,
        weights=tuple(manifest.weights_digest[:DIGITS_OF_DIGEST] for manifest in chain[:MAX_DIGESTS]),
    )


def _learning(chain: Sequence[Manifest]) -> Metrics:
    """Where a run arrived, and, as the mean over all of it, how fast it got there."""
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
    """Medians over iterations, without the first, which allocates and compiles: a disturbance of some does not count."""
    trained = [m for m in chain if m.collected is not None]
    steady = trained[1:] or trained
    stages = sorted({stage for manifest in steady for stage in manifest.timings})
    seconds = {f"seconds/{stage}": median(m.timings[stage] for m in steady if stage in m.timings) for stage in stages}
    return {"throughput/tokens_per_second": median(m.metrics["throughput/tokens_per_second"] for m in steady)} | seconds


def judge(measured: Measured, accepted: Sequence[Measured], reference: ReferenceRun, tolerances: Tolerances) -> Verdict:
    """Compare a run with the accepted ones, the oldest first."""
    comparisons = [
        comparison
        for quantity in _quantities(measured, accepted)
        for comparison in compare_with_all(quantity, measured, accepted, tolerances)
    ]
    return Verdict(
        reference=measured.reference,
        run_id=measured.run_id,
        comparisons=tuple(comparisons),
        defects=(
            *(f"{name} is {value}" for name, value in measured.quantities.items() if not math.isfinite(value)),
            *_below_fixed_limits(measured, reference),
            *_unrepeated(measured, accepted, reference),
        ),
        remarks=tuple(_changes(measured, accepted[-1])) if accepted else ("the first run of this reference",),
    )


def _quantities(measured: Measured, accepted: Sequence[Measured]) -> list[str]:
    """Those of the run, and those that learning had until now: what is no longer measured must not pass unseen."""
    had = {name for name in accepted[-1].quantities if not is_speed(name)} if accepted else set()
    return sorted(measured.quantities.keys() | had)


def is_speed(quantity: str) -> bool:
    return quantity.startswith(("seconds/", "throughput/"))


def is_only_slower(verdict: Verdict) -> bool:
    """A busy machine does that, too."""
    return verdict.is_regression and not verdict.defects and all(is_speed(found.quantity) for found in verdict.worse)


def compare_with_all(
    quantity: str, measured: Measured, accepted: Sequence[Measured], tolerances: Tolerances
) -> list[Comparison]:
    """With the newest, and, against drift, with the oldest, where those are not all there are."""
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
    """One value with those of accepted runs, by their median and spread. One that is missing or not a number is worse."""
    centre = median(accepted)
    tolerated = max(tolerances.sigmas * robust_sigma(accepted), least_difference(quantity, centre, tolerances))
    gain = math.nan if value is None else (centre - value if quantity.startswith("seconds/") else value - centre)
    if gain > tolerated:
        outcome = ComparisonOutcome.BETTER
    elif gain >= -tolerated:
        outcome = ComparisonOutcome.AS_BEFORE
    else:  # also where gain is not a number
        outcome = ComparisonOutcome.WORSE
    return Comparison(quantity=quantity, value=value, against=against, centre=centre, tolerated=tolerated, outcome=outcome)


def robust_sigma(values: Sequence[float]) -> float:
    """The standard deviation, as the median absolute deviation shows it: half of the values may be anything.

    Example: of 10, 11, 12, 13, 90 the deviations from 12 are 2, 1, 0, 1, 78; their median 1 is worth 1.4826 * 1.206.
    """
    count = len(values)
    if count < 2:
        return 0.0
    centre = median(values)
    correction = SMALL_SAMPLES.get(count, count / (count - 0.8))
    return correction * MAD_TO_SIGMA * median(abs(value - centre) for value in values)


def least_difference(quantity: str, centre: float, tolerances: Tolerances) -> float:
    """What is closer than this to the median says nothing, however much alike the accepted runs are."""
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
    values = {name: measured.quantities.get(name, math.nan) for name in reference.at_least}
    return [
        f"{name} is {values[name]:.4g}, at least {limit:.4g} is expected"
        for name, limit in reference.at_least.items()
        if not values[name] >= limit
    ]


def _unrepeated(measured: Measured, accepted: Sequence[Measured], reference: ReferenceRun) -> list[str]:
    """The newest accepted run that this one should equal, if it does not."""
    twins = [run for run in accepted if run.settings == measured.settings and run.origin == measured.origin]
    if not reference.reproducible or not twins or twins[-1].weights == measured.weights:
        return []
    place = _parting(measured.weights, twins[-1].weights)
    return [
        f"weights differ from those of {twins[-1].run_id} {place}, though config, code, libraries and machine are the same"
    ]


def _changes(measured: Measured, before: Measured) -> list[str]:
    """What is not as it was in the newest accepted run."""
    remarks = []
    if measured.weights == before.weights:
        remarks.append(f"the weights of {before.run_id}, to the bit")
    else:
        remarks.append(f"weights part from those of {before.run_id} {_parting(measured.weights, before.weights)}")
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


def _parting(weights: Sequence[str], others: Sequence[str]) -> str:
    pairs = zip(weights, others, strict=False)
    first = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(weights), len(others)))
    return f"from iteration {first} on"


def markdown(verdicts: Sequence[Verdict]) -> str:
    """The page about a night."""
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


def sentence(verdict: Verdict) -> str:
    """Example: quickstart-12: regression: accuracy/last is 0.71, the median of the last 12 accepted runs 0.96, ..."""
    if verdict.is_regression:
        return f"{verdict.run_id}: regression: {'; '.join(verdict.reasons)}"
    judged = [c for c in verdict.comparisons if c.outcome is not ComparisonOutcome.NOT_JUDGED]
    return f"{verdict.run_id}: accepted; {len(judged)} comparisons, none worse; {verdict.remarks[0]}"
