"""Dynamic sampling: which groups are worth training on, by their rewards alone (DAPO, arXiv:2503.14476, section 3.2)."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from roll_core.config.rollout import GroupFilter
from roll_core.errors import RollError, one_line
from roll_core.user_code import load_function

PREDICATE = "rollout.filter.predicate"


def build_filter(config: GroupFilter) -> Callable[[Sequence[float]], bool]:
    """Whether a group with these rewards passes every condition, the user's last."""
    if config.predicate is None:
        return partial(_passes, config)
    predicate = partial(_ask, config.predicate, load_function(PREDICATE, config.predicate))
    return lambda rewards: _passes(config, rewards) and predicate(rewards)


def _passes(keep: GroupFilter, rewards: Sequence[float]) -> bool:
    mean, spread = math.fsum(rewards) / len(rewards), max(rewards) - min(rewards)
    if keep.equal_rewards and spread == 0:
        return False
    if keep.min_spread is not None and spread < keep.min_spread:
        return False
    if keep.min_mean is not None and mean < keep.min_mean:
        return False
    return keep.max_mean is None or mean <= keep.max_mean


def _ask(name: str, predicate: Callable[[list[float]], bool], rewards: Sequence[float]) -> bool:
    try:
        return bool(predicate(list(rewards)))
    except Exception as error:
        raise RollError(f"{PREDICATE}: {name} failed for the rewards {list(rewards)}: {one_line(error)}") from error
