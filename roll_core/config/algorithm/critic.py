"""Config of the critic: the value model that some algorithms train beside the policy."""

from pydantic import NonNegativeInt, PositiveFloat

from roll_core.config.base import Section
from roll_core.config.optimizer import OptimizerConfig


class CriticOptimizer(OptimizerConfig):
    """AdamW settings of the critic."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate, reached at the end of the warm-up; customarily about ten times the policy's."""


class CriticConfig(Section):
    """A value model of the policy's shape, starting from its weights, trained beside it."""

    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: PositiveFloat | None = 0.2
    """A value may move this far from where it was before its loss stops falling (PPO's 0.2); null does not clip."""
    warmup_iterations: NonNegativeInt = 0
    """Iterations in which the critic learns and the policy does not move."""
