"""The reward that a config selects."""

from roll_core.config.rewards import ExactMatch, MathVerify, NumberMatch, ReasoningGym, RewardConfig
from roll_core.rewards.base import Reward
from roll_core.rewards.exact_match import ExactMatchReward
from roll_core.rewards.math_verify import MathVerifyReward
from roll_core.rewards.number_match import NumberMatchReward
from roll_core.rewards.reasoning_gym import ReasoningGymReward


def build_reward(config: RewardConfig) -> Reward:
    """Build the reward that a config selects."""
    match config:
        case ExactMatch():
            return ExactMatchReward(config.partial_credit)
        case NumberMatch():
            return NumberMatchReward(config.tolerance)
        case MathVerify():
            return MathVerifyReward(config)
        case ReasoningGym():
            return ReasoningGymReward(config)
