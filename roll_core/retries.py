"""The pauses between attempts at something that may pass by itself. What passes by itself is said in `errors.py`."""

import random

from roll_core.config.operations.services import RetriesConfig


def pauses(retries: RetriesConfig) -> list[float]:
    """Seconds to wait before each repeat: twice as long every time up to the longest, each cut by up to half."""
    longest, first = retries.longest_delay_seconds, retries.first_delay_seconds
    return [random.uniform(0.5, 1.0) * min(longest, first * 2 ** min(repeat, 60)) for repeat in range(retries.repeats)]
