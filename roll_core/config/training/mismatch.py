"""Config of the mismatch limits: what to do when trainer and sampler give different logprobs to the same tokens."""

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field, PositiveFloat, model_validator

from roll_core.config.base import Section

MISMATCH = "mismatch/"
"""Prefix of the metrics on the mismatch."""


class MismatchAction(StrEnum):
    """Reaction to a mismatch beyond the limits."""

    WARN = "warn"
    """Log a warning and train on the iteration."""
    CORRECT = "correct"
    """Train on the iteration with truncated importance sampling, unless the algorithm corrects already. Weights are by
    token; with gspo, whose ratio is that of a sequence (or turn), they are the geometric mean over it."""
    STOP = "stop"
    """End the run before the policy is updated."""


class MismatchConfig(Section):
    """Limits on the mismatch between the trainer's and the sampler's logprobs.

    Only tokens sampled by the very weights that are trained are judged: older tokens are expected to differ. A batch without
    such tokens is not judged.
    """

    max_mean: PositiveFloat | None = 0.05
    """Largest mean of |log(trainer / sampler)| over tokens; null sets no limit. Seen with a tiny model: 2e-7 with float32 on
    both sides, 0.005 with engines in bfloat16, 0.06 to 0.16 with engines at a temperature of 1.1 instead of 1, 0.2 to 0.5 at
    1.3."""
    max_kl: PositiveFloat | None = None
    """Largest KL(sampler || trainer) per token, in nats; null sets no limit."""
    max_share_off: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Largest share of tokens whose probabilities by trainer and sampler differ by more than a factor of 2; null sets no
    limit."""
    action: MismatchAction = MismatchAction.WARN
    """Reaction to an iteration beyond a limit."""

    @model_validator(mode="after")
    def _check_some_limit_is_set(self):
        if not any(limit is not None for limit in self._limits.values()):
            raise ValueError(
                "without max_mean, max_kl and max_share_off nothing is judged: set one, or leave mismatch out; "
                "the metrics are there anyway"
            )
        return self

    def exceeded_limit(self, metrics: Mapping[str, float]) -> str | None:
        """One sentence about the first limit that an iteration's metrics exceed; None if they exceed none."""
        for quantity, limit in self._limits.items():
            value = metrics.get(f"{MISMATCH}{quantity}")
            if limit is not None and value is not None and value > limit:
                return (
                    f"{MISMATCH}{quantity} is {value:.4g}, above training.mismatch.max_{quantity} ({limit:g}): "
                    "engines and trainer give different logprobs to tokens of the same weights; check the precision of "
                    "both, that engines sample at rollout.temperature, and that they hold the weights that were published"
                )
        return None

    @property
    def _limits(self) -> dict[str, float | None]:
        """Limit by metric name, without the prefix."""
        return {"mean": self.max_mean, "kl": self.max_kl, "share_off": self.max_share_off}
