"""Records of the nightly regression check: measurements of a reference run, and the verdict against accepted runs.

Used by `tracking/baselines.py` (stores them in MLflow), `reporting/regression.py` (judges) and `flows/nightly.py`.
"""

from enum import StrEnum

from roll_core.types.manifest import Metrics
from roll_core.types.refs import Record

NO_EFFECT_ON_LEARNING = ("store.", "tracking.", "work_dir", "legs.", "nodes.", "deadlines.", "retries.")
"""Prefixes of the config keys that do not affect what a run learns."""


class Origin(Record):
    """Machine, libraries and code that produced a run.

    Example: Origin(machine="AMD EPYC 7B13, 2 CPUs", versions="python 3.11.2, torch 2.13.0", code="0.2.0+9f86d081884c")
    """

    machine: str
    """Kind of machine, not its name. Durations on two kinds of machine cannot be compared."""
    versions: str
    """Versions of Python and of the libraries that affect results."""
    code: str
    """Version and digest of our source code."""


class Measured(Record):
    """Measurements of a finished reference run.

    Example: Measured(reference="quickstart", run_id="quickstart-12", quantities={"accuracy/last": 0.96},
    settings={"seed": "0"}, origin=Origin(...), weights=("77d0a3f1", "0b12c9aa"))
    """

    reference: str
    """Name of the reference: `name` in the run's config."""
    run_id: str
    quantities: Metrics
    """Measured values by name, such as final accuracy and seconds per stage."""
    settings: dict[str, str]
    """Config settings that affect learning (`learning_settings`)."""
    origin: Origin
    weights: tuple[str, ...]
    """Prefixes of the weights digests of all iterations, in order."""


def learning_settings(flat_config: dict[str, str]) -> dict[str, str]:
    """Return the settings that affect learning, by dotted key: all but where a run stores data and how long it waits."""
    return {key: value for key, value in flat_config.items() if not key.startswith(NO_EFFECT_ON_LEARNING)}


class ComparisonOutcome(StrEnum):
    """Result of comparing one quantity with the accepted runs."""

    WORSE = "worse"
    AS_BEFORE = "as before"
    BETTER = "better"
    NOT_JUDGED = "not judged"


class Comparison(Record):
    """Comparison of one quantity of a run with the accepted runs.

    Example: Comparison(quantity="seconds/update", value=0.31, against="the last 12", centre=0.17, tolerated=0.05,
    outcome="worse")
    """

    quantity: str
    value: float | None
    """Value in the new run; null if it is missing there."""
    against: str
    """Description of the accepted runs that it is compared with."""
    centre: float | None = None
    """Median of the accepted runs; null if there are none."""
    tolerated: float | None = None
    """Largest tolerated distance from `centre`, in the unit of the quantity."""
    outcome: ComparisonOutcome

    @property
    def sentence(self) -> str:
        """Sentence that states the comparison.

        Example: seconds/update is 0.31, the median of the last 12 accepted runs 0.17, tolerated 0.05 more or less
        """
        value = "missing" if self.value is None else f"{self.value:.4g}"
        if self.centre is None or self.tolerated is None:
            return f"{self.quantity} is {value}, {self.against}"
        return (
            f"{self.quantity} is {value}, the median of {self.against} accepted runs {self.centre:.4g}, "
            f"tolerated {self.tolerated:.2g} more or less"
        )


class Verdict(Record):
    """Verdict on a reference run: whether it is a regression, and why.

    Example: Verdict(reference="quickstart", run_id="quickstart-12", comparisons=(Comparison(...),), defects=(), remarks=())
    """

    reference: str
    run_id: str
    comparisons: tuple[Comparison, ...] = ()
    defects: tuple[str, ...] = ()
    """Defects that need no statistics: the run did not finish, missed a fixed limit, or did not reproduce exactly."""
    remarks: tuple[str, ...] = ()
    """Observations that help to find a cause."""

    @property
    def worse(self) -> tuple[Comparison, ...]:
        """Comparisons in which the run is worse."""
        return tuple(comparison for comparison in self.comparisons if comparison.outcome is ComparisonOutcome.WORSE)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the run is a regression, a sentence each; empty if it is none."""
        return (*self.defects, *(comparison.sentence for comparison in self.worse))

    @property
    def is_regression(self) -> bool:
        """True if the run must not be accepted."""
        return bool(self.reasons)
