"""Counter-based random numbers for sampling, vectorized over requests: functions of a request's seed and a token's index
alone.

The generator is SplitMix64 (Steele, Lea & Flood 2014): a counter and a hash, so there is no state to keep, copy or restore.
"""

import numpy as np

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds_B: np.ndarray, indices_B: np.ndarray) -> np.ndarray:
    """One uniform random number in [0, 1) for each pair of seed and token index; both arrays are uint64."""
    z_B = _mix(seeds_B) + (indices_B + np.uint64(1)) * _INCREMENT
    return (_mix(z_B) >> np.uint64(11)) * 2.0**-53


def _mix(z_B: np.ndarray) -> np.ndarray:
    z_B = (z_B ^ (z_B >> np.uint64(30))) * _FIRST_FACTOR
    z_B = (z_B ^ (z_B >> np.uint64(27))) * _SECOND_FACTOR
    return z_B ^ (z_B >> np.uint64(31))
