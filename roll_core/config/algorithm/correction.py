"""Config of corrections for tokens whose sampler differs from the trained policy, by rounding or by staleness."""

from enum import StrEnum

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from roll_core.config.base import Section


class CorrectionLevel(StrEnum):
    """Span of tokens that share one importance ratio."""

    TOKEN = "token"
    """Each token has its own ratio."""
    SEGMENT = "segment"
    """Tokens of a turn share the geometric mean of their ratios."""
    GEOMETRIC = "geometric"
    """Tokens of a sequence share the geometric mean of their ratios."""
    SEQUENCE = "sequence"
    """Tokens of a sequence share the product of their ratios."""


class Compared(StrEnum):
    """Quantity that a filter compares with its bounds."""

    RATIO = "ratio"
    """Ratio anchor / sampler."""
    DIFFERENCE = "difference"
    """Difference of the probabilities, anchor - sampler."""


class WeightingConfig(Section):
    """Multiply the objective by anchor / sampler, cut off above: truncated importance sampling (TIS, Yao et al. 2025)."""

    level: CorrectionLevel = CorrectionLevel.TOKEN
    lower: NonNegativeFloat = 0.0
    """Smallest weight."""
    upper: PositiveFloat | None = 2.0
    """Largest weight (TIS: 2); null never cuts off."""

    @model_validator(mode="after")
    def _check_lower_below_upper(self):
        if self.upper is not None and self.lower >= self.upper:
            raise ValueError(f"lower ({self.lower}) must be below upper ({self.upper})")
        return self


class FilterConfig(Section):
    """Remove tokens outside [lower, upper]. At token level with a ratio, and `weighting: {upper: null}` beside it, this is
    IcePop (arXiv 2510.18855)."""

    level: CorrectionLevel = CorrectionLevel.TOKEN
    compared: Compared = Compared.RATIO
    lower: float | None = None
    """Null: 0.5 for ratios (IcePop's), -0.2 for differences of probabilities (ROLL's)."""
    upper: float | None = None
    """Null: 5 for ratios (IcePop's), 0.2 for differences of probabilities (ROLL's)."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound, with the defaults in place of null."""
        lower, upper = (0.5, 5.0) if self.compared is Compared.RATIO else (-0.2, 0.2)
        return lower if self.lower is None else self.lower, upper if self.upper is None else self.upper

    @model_validator(mode="after")
    def _check_lower_below_upper(self):
        lower, upper = self.bounds
        if lower >= upper:
            raise ValueError(f"lower ({lower}) must be below upper ({upper}): everything would be removed")
        return self

    @model_validator(mode="after")
    def _check_a_difference_has_no_product(self):
        if self.compared is Compared.DIFFERENCE and self.level is CorrectionLevel.SEQUENCE:
            raise ValueError(
                "level sequence is a product of ratios, which compared difference does not have: set level geometric for "
                "the mean difference of a sequence, or compared ratio"
            )
        return self


class CorrectionConfig(Section):
    """Any of the three; reports the share of tokens kept and the effective sample size."""

    weighting: WeightingConfig | None = WeightingConfig()
    """Null does not weight."""
    filters: tuple[FilterConfig, ...] = ()
    veto_below: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Remove a whole sequence if the ratio of any of its tokens is below this, for example 1e-4."""

    @model_validator(mode="after")
    def _check_some_correction_is_set(self):
        if self.weighting is None and not self.filters and self.veto_below is None:
            raise ValueError(
                "without weighting, filters and veto_below nothing is corrected: set one, or leave correction out"
            )
        return self
