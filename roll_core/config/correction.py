"""Corrections for the difference between the policy that sampled the tokens and the one that trains on them."""

from enum import StrEnum

from pydantic import Field, PositiveFloat, model_validator

from roll_core.config.base import Section


class CorrectionLevel(StrEnum):
    """What shares one ratio: a token; a turn (geometric mean); a sequence (geometric mean); a sequence (product)."""

    TOKEN = "token"
    SEGMENT = "segment"
    GEOMETRIC = "geometric"
    SEQUENCE = "sequence"


class Compared(StrEnum):
    """What a filter looks at: the ratio anchor / sampler, or the difference of their probabilities."""

    RATIO = "ratio"
    DIFFERENCE = "difference"


class WeightingConfig(Section):
    """Multiply the objective by anchor / sampler, cut off above: truncated importance sampling (TIS, Yao et al. 2025)."""

    level: CorrectionLevel = CorrectionLevel.TOKEN
    upper: PositiveFloat | None = 2.0
    """Largest weight (TIS: 2); null never cuts off."""


class FilterConfig(Section):
    """Remove tokens outside [lower, upper]; at token level with a ratio, IcePop's two-sided mask (arXiv 2510.18855)."""

    level: CorrectionLevel = CorrectionLevel.TOKEN
    compared: Compared = Compared.RATIO
    lower: float = 0.5
    """IcePop: 0.5. For differences of probabilities, for example -0.2."""
    upper: float = 5.0
    """IcePop: 5. For differences of probabilities, for example 0.2."""

    @model_validator(mode="after")
    def _in_order(self):
        if self.lower >= self.upper:
            raise ValueError(f"lower ({self.lower}) must be below upper ({self.upper}): everything would be removed")
        return self


class CorrectionConfig(Section):
    """Any of the three; reports the share of tokens kept and the effective sample size."""

    weighting: WeightingConfig | None = WeightingConfig()
    """Null does not weight."""
    filters: tuple[FilterConfig, ...] = ()
    veto_below: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Remove a whole sequence if the ratio of any of its tokens is below this, for example 1e-4."""
