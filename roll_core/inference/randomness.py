"""Random numbers that depend on a request's seed and a token's place alone, for many requests at once.

SplitMix64 (Steele, Lea & Flood 2014): a counter and a hash, so there is no state to keep, copy or restore.
"""

import numpy as np

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds_B: np.ndarray, places_B: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, place); both are uint64 arrays."""
    z_B = _mix(seeds_B) + (places_B + np.uint64(1)) * _INCREMENT
    return (_mix(z_B) >> np.uint64(11)) * 2.0**-53


def _mix(z_B: np.ndarray) -> np.ndarray:
    z_B = (z_B ^ (z_B >> np.uint64(30))) * _FIRST
    z_B = (z_B ^ (z_B >> np.uint64(27))) * _SECOND
    return z_B ^ (z_B >> np.uint64(31))
