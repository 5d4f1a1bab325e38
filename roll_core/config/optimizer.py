"""Config of AdamW, shared by the policy, the critic and the warm start; and config of the warm start."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from roll_core.config.base import Section, Unit


class Decay(StrEnum):
    """Shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    """Stays at learning_rate."""
    LINEAR = "linear"
    """Falls in a straight line to final_fraction of learning_rate."""
    COSINE = "cosine"
    """Falls along half a cosine to final_fraction of learning_rate."""


class OptimizerConfig(Section):
    """Settings of AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the running mean of gradients."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the running mean of squared gradients. 0.95 rather than Adam's 0.999, because RL gradients change fast."""
    epsilon: PositiveFloat = 1e-8
    """Constant in the denominator of an update, against division by zero."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; 0 is none."""
    max_gradient_norm: PositiveFloat = 1.0
    """Largest norm of the whole gradient; a longer gradient is scaled down to it."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly to its peak."""
    decay: Decay = Decay.CONSTANT
    """Shape of the learning rate after the warm-up, up to the last optimizer step."""
    final_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Learning rate at the last step, as a share of learning_rate. Only with `decay: linear` or `decay: cosine`."""


class WarmStartOptimizer(OptimizerConfig):
    """Settings of AdamW for a small model that learns from scratch."""

    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate, reached at the end of the warm-up. The default suits a small model that learns from scratch."""
    beta2: float = Field(default=0.98, ge=0.0, lt=1.0)
    """Decay of the running mean of squared gradients."""
    warmup_steps: NonNegativeInt = 20
    """Optimizer steps over which the learning rate rises linearly to its peak."""


class WarmStartConfig(Section):
    """Supervised steps on demonstrations before the first iteration, so that rewards are not all zero."""

    steps: PositiveInt = 200
    """Optimizer steps of the warm start."""
    batch_size: Annotated[PositiveInt, Unit("demonstrations")] = 64
    """Demonstrations per optimizer step."""
    optimizer: WarmStartOptimizer = WarmStartOptimizer()
    """AdamW settings of the warm start."""
