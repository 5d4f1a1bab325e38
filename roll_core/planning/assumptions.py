"""Lengths of prompts and completions that are assumed for a config without a recorded run. `roll plan` and `roll simulate`
print where they use them."""

import math

from roll_core.config.inference import RehearsalInference
from roll_core.config.run import RunConfig

MEDIAN_SHARE, SIGMA = 1 / 4, 0.8
"""Parameters of lognormal completion lengths: median as a share of rollout.max_new_tokens, and sigma. One completion in 25
then reaches the limit."""
PROMPT_SHARE = 1 / 8
"""Mean prompt length as a share of model.max_positions minus rollout.max_new_tokens."""


def assumed_tokens(config: RunConfig) -> tuple[float, float]:
    """Mean tokens of a prompt and of a completion."""
    most = config.rollout.max_new_tokens
    median, sigma = MEDIAN_SHARE * most, SIGMA
    if isinstance(config.inference, RehearsalInference):
        median, sigma = config.inference.median_tokens, config.inference.sigma
    return PROMPT_SHARE * (config.model.max_positions - most), min(most, median * math.exp(sigma**2 / 2))
