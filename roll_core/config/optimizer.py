"""Optimizer settings, shared by the policy, the critic and the warm start; and the warm start itself."""

from enum import StrEnum

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from roll_core.config.base import Section


class Decay(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""

    learning_rate: PositiveFloat = 1e-6
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """0.95 rather than Adam's 0.999: RL gradients change fast."""
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_gradient_norm: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly to its value."""
    decay: Decay = Decay.CONSTANT
    """Shape of the learning rate after the warm-up, over all optimizer steps of the run."""
    final_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Where linear and cosine decay end, as a share of learning_rate."""


class WarmStartOptimizer(OptimizerConfig):
    """For a small model that learns from scratch."""

    learning_rate: PositiveFloat = 3e-3
    beta2: float = Field(default=0.98, ge=0.0, lt=1.0)
    warmup_steps: NonNegativeInt = 20


class WarmStartConfig(Section):
    """Supervised steps on demonstrations before the first iteration, so that rewards are not all zero."""

    steps: PositiveInt = 200
    batch_size: PositiveInt = 64
    """Demonstrations per step."""
    optimizer: WarmStartOptimizer = WarmStartOptimizer()
