"""What the nightly alarm passes around: what was measured of a reference run, and what that is against earlier ones.

Used by `tracking/baselines.py`, which keeps them in MLflow, `reporting/regression.py`, which judges, and `flows/nightly.py`.
"""

from enum import StrEnum

from roll_core.types.manifest import Metrics
from roll_core.types.refs import Record

NOT_LEARNED_FROM = ("store.", "tracking.", "work_dir", "legs.", "nodes.", "deadlines.", "retries.")


class Origin(Record):
    """What made a run, beside its config.

    Example: Origin(machine="AMD EPYC 7B13, 2 CPUs", versions="python 3.11.2, torch 2.13.0", code="0.1.0+9f86d081884c")
    """

    machine: str
    """The kind of machine, not which one: seconds of two kinds cannot be compared."""
    versions: str
    code: str


class Measured(Record):
    """A finished reference run, as far as the alarm looks at it.

    Example: Measured(reference="quickstart", run_id="quickstart-12", quantities={"accuracy/last": 0.96},
    settings={"seed": "0"}, origin=Origin(...), weights=("77d0a3f1", "0b12c9aa"))
    """

    reference: str
    """The name in the run's config."""
    run_id: str
    quantities: Metrics
    settings: dict[str, str]
    """`settings_of` its config."""
    origin: Origin
    weights: tuple[str, ...]
    """Beginnings of the digests of the policy, iteration by iteration."""


def settings_of(flat_config: dict[str, str]) -> dict[str, str]:
    """A config by dotted keys, without those that say where and how patiently: they change nothing that is learned."""
    return {key: value for key, value in flat_config.items() if not key.startswith(NOT_LEARNED_FROM)}


class ComparisonOutcome(StrEnum):
    WORSE = "worse"
    AS_BEFORE = "as before"
    BETTER = "better"
    NOT_JUDGED = "not judged"


class Comparison(Record):
    """One quantity against those of accepted runs.

    Example: Comparison(quantity="seconds/update", value=0.31, against="the last 12", centre=0.17, tolerated=0.05,
    outcome="worse")
    """

    quantity: str
    value: float | None
    """None if the run does not have it."""
    against: str
    centre: float | None = None
    """The median of the accepted runs; None if there is none to compare with."""
    tolerated: float | None = None
    """By how much a run may be worse than the centre."""
    outcome: ComparisonOutcome

    @property
    def sentence(self) -> str:
        """Example: seconds/update is 0.31, the median of the last 12 accepted runs 0.17, tolerated 0.05 more or less"""
        value = "missing" if self.value is None else f"{self.value:.4g}"
        if self.centre is None or self.tolerated is None:
            return f"{self.quantity} is {value}, {self.against}"
        return (
            f"{self.quantity} is {value}, the median of {self.against} accepted runs {self.centre:.4g}, "
            f"tolerated {self.tolerated:.2g} more or less"
        )


class Verdict(Record):
    """Whether a run may stand among the accepted ones, and why not.

    Example: Verdict(reference="quickstart", run_id="quickstart-12", comparisons=(Comparison(...),), defects=(), remarks=())
    """

    reference: str
    run_id: str
    comparisons: tuple[Comparison, ...] = ()
    defects: tuple[str, ...] = ()
    """Reasons that need no statistics: it did not finish, missed a fixed limit, or did not repeat what it should have."""
    remarks: tuple[str, ...] = ()
    """What somebody who looks for a cause wants to know."""

    @property
    def worse(self) -> tuple[Comparison, ...]:
        return tuple(comparison for comparison in self.comparisons if comparison.outcome is ComparisonOutcome.WORSE)

    @property
    def reasons(self) -> tuple[str, ...]:
        return (*self.defects, *(comparison.sentence for comparison in self.worse))

    @property
    def is_regression(self) -> bool:
        return bool(self.reasons)
