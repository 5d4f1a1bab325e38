"""What `flows/nightly.py` trains every night, and by how much it may be worse than before."""

from pydantic import Field, PositiveFloat, PositiveInt

from roll_core.config.base import Section


class Tolerances(Section):
    """When a run is worse than the accepted ones: further from their median than `sigmas` of their spread, and further than
    the least difference that means anything."""

    sigmas: PositiveFloat = 4.0
    """Robust standard deviations: scaled median absolute deviations, which a few odd nights do not move. The spread of few
    runs is a guess: of normal noise one value in 27 is beyond 4 with 5 accepted runs, in 130 with 10, in 430 with 20. That
    nights are quiet all the same is due to the least differences below, and to training again what is only slower."""
    accuracy: PositiveFloat = 0.06
    """Least difference in accuracy: three standard errors between two evaluations of 256 problems at 0.95,
    3 * sqrt(2 * 0.95 * 0.05 / 256). After any change of rounding a seed is another draw."""
    reward: PositiveFloat = 0.05
    """Least difference in reward. Two seeds of the quickstart differ by 0.013, over the run and over its last quarter."""
    speed: PositiveFloat = Field(default=0.2, lt=1.0)
    """Least difference in seconds and tokens/s, as a share of the median: machines that others use vary by that much."""
    seconds: PositiveFloat = 0.05
    """Least difference of a stage's seconds: shorter ones are noise of the operating system."""
    speed_baselines: PositiveInt = 5
    """Accepted runs on the same kind of machine before speed is judged: fewer do not show how it varies."""
    recent: PositiveInt = 20
    """Newest accepted runs a run is compared with."""
    oldest: PositiveInt = 5
    """Oldest accepted runs it is compared with, too: what gets worse by a little every night takes the newest along."""


class ReferenceRun(Section):
    """A small run with a fixed seed. It is known by the name in its config."""

    config: str
    """A run file, relative to this one."""
    overrides: tuple[str, ...] = ()
    at_least: dict[str, float] = Field(default_factory=dict)
    """Quantities that must reach a value on any machine, from the first night on, when there is nothing to compare with:
    {"accuracy/last": 0.85}."""
    reproducible: bool = True
    """Whether the same code, libraries, config and kind of machine must give the same weights, to the bit. So it is for
    synchronous runs on CPUs; not with rollout.async_ratio or redundancy, nor on GPUs."""


class NightlyConfig(Section):
    references: tuple[ReferenceRun, ...] = Field(min_length=1)
    tolerances: Tolerances = Tolerances()
