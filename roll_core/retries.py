"""Backoff between retries of transient failures, for PURE tasks and reward workers.

`errors.classify` decides which failures are transient.
"""

import random

from roll_core.config.operations.services import RetriesConfig


def backoff_delays(retries: RetriesConfig) -> list[float]:
    """Seconds to wait before each retry: exponential backoff up to `longest_delay_seconds`, with a jitter of up to half."""
    longest, first = retries.longest_delay_seconds, retries.first_delay_seconds
    return [random.uniform(0.5, 1.0) * min(longest, first * 2 ** min(repeat, 60)) for repeat in range(retries.repeats)]
