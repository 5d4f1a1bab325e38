"""Learning-rate schedule as a pure function of the step, so that a resumed run needs only the step number."""

import math

from roll_core.config.optimizer import Decay, OptimizerConfig


def learning_rate_at(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0. With warmup_steps=4 the first four steps have 1/4, 2/4, 3/4
    and 1 of the rate; the decay follows."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * _decayed(config.decay, progress))


def _decayed(decay: Decay, progress: float) -> float:
    """Fraction of the decaying part of the rate that is left at `progress`, which runs from 0 to 1."""
    match decay:
        case Decay.CONSTANT:
            return 1.0
        case Decay.LINEAR:
            return 1 - progress
        case Decay.COSINE:
            return (1 + math.cos(math.pi * progress)) / 2
