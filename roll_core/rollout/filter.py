"""Dynamic sampling: which groups are worth training on, by their rewards alone (DAPO, arXiv:2503.14476, section 3.2)."""

import math
from collections.abc import Sequence

from roll_core.config.rollout import GroupFilter


def is_useful(keep: GroupFilter, rewards: Sequence[float]) -> bool:
    """Whether a group with these rewards passes every condition of the filter."""
    mean, spread = math.fsum(rewards) / len(rewards), max(rewards) - min(rewards)
    if keep.equal_rewards and spread == 0:
        return False
    if keep.min_spread is not None and spread < keep.min_spread:
        return False
    if keep.min_mean is not None and mean < keep.min_mean:
        return False
    return keep.max_mean is None or mean <= keep.max_mean
