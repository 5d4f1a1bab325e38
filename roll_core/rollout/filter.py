"""Dynamic sampling: decides by its rewards alone whether a group is trained on (DAPO, arXiv:2503.14476, section 3.2)."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from roll_core.config.rollout import GroupFilter
from roll_core.errors import RollError, one_line
from roll_core.user_code import load_function

PREDICATE = "rollout.filter.predicate"
"""Config key of the user's own condition, for error messages."""


def build_filter(config: GroupFilter) -> Callable[[Sequence[float]], bool]:
    """Build a predicate on a group's rewards: True if they pass every condition of the config, the user's predicate last."""
    if config.predicate is None:
        return partial(_passes, config)
    predicate = partial(_call_predicate, config.predicate, load_function(PREDICATE, config.predicate))
    return lambda rewards: _passes(config, rewards) and predicate(rewards)


def _passes(config: GroupFilter, rewards: Sequence[float]) -> bool:
    mean, spread = math.fsum(rewards) / len(rewards), max(rewards) - min(rewards)
    if config.equal_rewards and spread == 0:
        return False
    if config.min_spread is not None and spread < config.min_spread:
        return False
    if config.min_mean is not None and mean < config.min_mean:
        return False
    return config.max_mean is None or mean <= config.max_mean


def _call_predicate(name: str, predicate: Callable[[list[float]], bool], rewards: Sequence[float]) -> bool:
    try:
        return bool(predicate(list(rewards)))
    except Exception as error:
        raise RollError(f"{PREDICATE}: {name} failed for the rewards {list(rewards)}: {one_line(error)}") from error
