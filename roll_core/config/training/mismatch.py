"""What happens when engines and trainer do not give the same logprobs to the same tokens."""

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field, PositiveFloat, model_validator

from roll_core.config.base import Section

MISMATCH = "mismatch/"
"""The area of the metrics that say how far sampler and trainer are apart."""


class MismatchAction(StrEnum):
    """WARN: say so, and train. CORRECT: train that iteration with token-level truncated importance sampling, unless the
    algorithm corrects for its sampler anyway. STOP: end the run before the policy moves."""

    WARN = "warn"
    CORRECT = "correct"
    STOP = "stop"


class MismatchConfig(Section):
    """Limits on how far the trainer's logprobs may be from the sampler's, for tokens that were sampled by the very weights
    that are trained; older tokens are expected to differ, and a batch of none but those is not judged."""

    max_mean: PositiveFloat | None = 0.05
    """Of |log(trainer / sampler)|, mean over tokens. Seen with a tiny model: 2e-7 with float32 on both sides, 0.005 with
    engines in bf16, 0.06 to 0.16 with engines at a temperature of 1.1 instead of 1, 0.2 to 0.5 at 1.3."""
    max_kl: PositiveFloat | None = None
    """Of KL(sampler || trainer) per token."""
    max_share_off: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Of the share of tokens to which one of the two gives more than twice the probability that the other gives."""
    action: MismatchAction = MismatchAction.WARN

    @model_validator(mode="after")
    def _judges_something(self):
        if not any(limit is not None for limit in self._limits.values()):
            raise ValueError(
                "without max_mean, max_kl and max_share_off nothing is judged: set one, or leave agreement out; "
                "the metrics are there anyway"
            )
        return self

    def complaint(self, metrics: Mapping[str, float]) -> str | None:
        """One sentence about the first limit that an iteration's metrics are beyond, if they are beyond any."""
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
        return {"mean": self.max_mean, "kl": self.max_kl, "share_off": self.max_share_off}
