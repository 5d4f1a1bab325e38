"""Config of the nightly regression flow (`flows/nightly.py`): which runs it trains and by how much they may be worse."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from roll_core.config.base import Section, Unit


class Tolerances(Section):
    """Limits beyond which a run is worse than the accepted ones. A value is worse if it is further from their median than
    `sigmas` times their spread, and further than the smallest meaningful difference."""

    sigmas: Annotated[PositiveFloat, Unit("standard deviations")] = 4.0
    """Largest distance from the median, in robust standard deviations (scaled median absolute deviations, which a few odd
    nights do not move). The spread of few runs is uncertain: of normal noise one value in 27 is beyond 4 with 5 accepted
    runs, in 130 with 10, in 430 with 20. The smallest differences below, and a second run of what is only slower, keep false
    alarms rare all the same."""
    accuracy: PositiveFloat = 0.06
    """Smallest meaningful difference in accuracy. The default is three standard errors between two evaluations of 256
    problems at 0.95: 3 * sqrt(2 * 0.95 * 0.05 / 256). After any change of rounding a seed is another draw."""
    reward: PositiveFloat = 0.05
    """Smallest meaningful difference in reward. Two seeds of the quickstart differ by 0.013, over the run and over its last
    quarter."""
    speed: Annotated[PositiveFloat, Unit("share of the median")] = Field(default=0.2, lt=1.0)
    """Smallest meaningful difference in seconds and tokens/s, as a share of the median. Shared machines vary by 0.2."""
    seconds: Annotated[PositiveFloat, Unit("seconds")] = 0.05
    """Smallest meaningful difference in a stage's duration, in seconds. Shorter differences are operating system noise."""
    speed_baselines: Annotated[PositiveInt, Unit("runs")] = 5
    """Accepted runs on the same kind of machine that are needed before speed is judged: fewer do not show how it varies."""
    recent: Annotated[PositiveInt, Unit("runs")] = 20
    """Newest accepted runs that a run is compared with."""
    oldest: Annotated[PositiveInt, Unit("runs")] = 5
    """Oldest accepted runs that a run is compared with, too. They detect slow drift, which the newest runs follow."""


class ReferenceRun(Section):
    """Small run with a fixed seed, trained every night. Its identity is the `name` in its config."""

    config: str
    """Path of a run file, relative to the nightly file."""
    overrides: tuple[str, ...] = ()
    """Changes to the run file, each as key=value, like --set."""
    at_least: dict[str, float] = Field(default_factory=dict)
    """Smallest allowed value by quantity, on any machine and from the first night on, when there are no accepted runs to
    compare with. Example: {"accuracy/last": 0.85}."""
    reproducible: bool = True
    """True if equal code, libraries, config and kind of machine must give equal weights, to the bit. Set it to false for
    runs with rollout.async_ratio or redundancy, and for runs on GPUs."""


class NightlyConfig(Section):
    """A nightly file: reference runs to train every night, and tolerances to judge them by."""

    references: tuple[ReferenceRun, ...] = Field(min_length=1)
    """Runs to train and judge; at least one."""
    tolerances: Tolerances = Tolerances()
    """Limits beyond which a run counts as a regression."""
