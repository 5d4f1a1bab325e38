"""How the weight of a KL penalty moves from iteration to iteration. Pure: the state is the weight itself."""


def adapted_coefficient(
    coefficient: float, *, measured: float, target: float, num_samples: int, horizon: float, max_error: float
) -> float:
    """Ziegler et al. (arXiv 1909.08593): up when the KL is above its target, down when below, by at most `max_error` of
    itself every `horizon` samples."""
    error = min(max(measured / target - 1, -max_error), max_error)
    # A batch larger than the horizon must not push the weight below zero.
    return coefficient * (1 + error * min(num_samples / horizon, 1.0))
