"""Advantages: how much better than expected each trained token did. Each method once, by its paper's name; AdvantageInputs
in, one number per trained token out. Shapes as in `inputs.py`; G groups."""

import torch
from torch import Tensor

from roll_core.algorithms.grouping import (
    centred_by,
    count_by,
    discounted_sums,
    last_of,
    max_by,
    number_pairs,
    std_by,
    sum_by,
)
from roll_core.algorithms.inputs import AdvantageInputs

STD_EPSILON = 1e-6
"""Keeps nearly equal rewards from being blown up; far below any difference a reward means."""


def monte_carlo_return(inputs: AdvantageInputs, *, discount: float = 1.0) -> Tensor:
    """Return from each token on (REINFORCE, Williams 1992): turn rewards are paid at the end of their turns, the rest of the
    outcome at the last token."""
    paid_N = _paid_per_token(inputs.rewards_S, inputs)
    return discounted_sums(paid_N, inputs.sequence_N, inputs.num_sequences, discount)


def batch_normalized(inputs: AdvantageInputs, *, discount: float = 1.0) -> Tensor:
    """Returns, standardised over all tokens of the batch (REINFORCE++, arXiv 2501.03262)."""
    return whitened(monte_carlo_return(inputs, discount=discount))


def group_baseline_batch_normalized(inputs: AdvantageInputs) -> Tensor:
    """Rewards minus their group's mean, then standardised over all tokens of the batch (REINFORCE++-baseline)."""
    return whitened(group_relative(inputs))


def group_relative(inputs: AdvantageInputs) -> Tensor:
    """Reward minus the mean of its group (Dr.GRPO, arXiv 2503.20783); equal rewards give exactly zero."""
    return _returns(_centred(inputs), inputs)


def group_normalized(inputs: AdvantageInputs) -> Tensor:
    """Reward minus the mean of its group, over the group's unbiased standard deviation (GRPO, arXiv 2402.03300)."""
    std_G = std_by(inputs.rewards_S, inputs.group_S, _num_groups(inputs))
    return _returns(_centred(inputs) / (std_G[inputs.group_S] + STD_EPSILON), inputs)


def group_mean_batch_std(inputs: AdvantageInputs) -> Tensor:
    """Reward minus the mean of its group, over the standard deviation of the whole batch (LitePPO, arXiv 2508.08221)."""
    std = std_by(inputs.rewards_S, torch.zeros_like(inputs.group_S), 1)
    return _returns(_centred(inputs) / (std + STD_EPSILON), inputs)


def leave_one_out(inputs: AdvantageInputs) -> Tensor:
    """Reward minus the mean of the others of its group (RLOO, arXiv 2402.14740); zero if alone in a group. Token rewards (a
    KL penalty) are summed into the reward before the mean is taken, as in TRL and verl."""
    num_groups, rewards_S = _num_groups(inputs), inputs.rewards_S
    if inputs.token_rewards_N is not None:
        rewards_S = rewards_S + sum_by(inputs.token_rewards_N, inputs.sequence_N, inputs.num_sequences)
    sizes_S = count_by(inputs.group_S, num_groups, rewards_S)[inputs.group_S]
    advantages_S = centred_by(rewards_S, inputs.group_S, num_groups) * sizes_S / (sizes_S - 1).clamp(min=1)
    return advantages_S[inputs.sequence_N]


def greedy_baseline(inputs: AdvantageInputs) -> Tensor:
    """Reward minus that of the greedy completion to the same problem (ReMax, arXiv 2310.10505)."""
    assert inputs.greedy_rewards_S is not None, "greedy rewards were not collected"
    return _returns(inputs.rewards_S - inputs.greedy_rewards_S, inputs)


def constant_baseline(inputs: AdvantageInputs, *, baseline: float) -> Tensor:
    """Reward minus a number that is the same for all (TOPR's c, arXiv 2503.14286)."""
    return _returns(inputs.rewards_S - baseline, inputs)


def best_of_group(inputs: AdvantageInputs, *, minimum_reward: float = 0.0) -> Tensor:
    """Best of each group (RAFT++, arXiv 2504.11343): 1 for trajectories with their group's highest reward, if above a
    minimum, 0 for the others."""
    best_S = max_by(inputs.rewards_S, inputs.group_S, _num_groups(inputs))[inputs.group_S]
    chosen_S = (inputs.rewards_S == best_S) & (inputs.rewards_S > minimum_reward)
    return _returns(chosen_S.to(inputs.rewards_S.dtype), inputs)


def generalized_advantage(
    inputs: AdvantageInputs, *, discount: float, trace_decay: float, bootstrap_truncated: bool
) -> Tensor:
    """GAE (arXiv 1506.02438): d_t = r_t + discount * V_{t+1} - V_t; A_t = d_t + discount * trace_decay * A_{t+1}.

    V after the last token is 0 when the trajectory ended by itself, and the critic's when it was cut off (arXiv 1712.00378).
    Observations between turns are skipped: the value that follows a token is the one at the next trained token.
    """
    assert inputs.values_N is not None, "values were not computed"
    values_N, last_S = inputs.values_N, last_of(inputs.sequence_N, inputs.num_sequences)
    after_last_S = torch.zeros_like(inputs.rewards_S)
    if bootstrap_truncated:
        assert inputs.final_values_S is not None, "final values were not computed"
        after_last_S = torch.where(inputs.truncated_S, inputs.final_values_S, after_last_S)
    next_values_N = torch.cat([values_N[1:], values_N.new_zeros(1)]).index_copy(0, last_S, after_last_S.to(values_N.dtype))
    rewards_N = _paid_per_token(inputs.rewards_S, inputs)
    deltas_N = rewards_N + discount * next_values_N - values_N
    return discounted_sums(deltas_N, inputs.sequence_N, inputs.num_sequences, discount * trace_decay)


def turn_return(inputs: AdvantageInputs, *, discount: float) -> Tensor:
    """Return from each turn on, discounted per turn, the same for all tokens of a turn."""
    return _turn_returns(inputs, discount)[inputs.turn_N] + _token_returns(inputs)


def normalized_step_return(inputs: AdvantageInputs, *, discount: float) -> Tensor:
    """Turn returns, standardised over all turns of their group."""
    group_T = inputs.group_S[inputs.sequence_T]
    return _standardized(_turn_returns(inputs, discount), group_T, _num_groups(inputs))[inputs.turn_N] + _token_returns(
        inputs
    )


def group_in_group(
    inputs: AdvantageInputs, *, discount: float, episode_weight: float, step_weight: float, scale_by_std: bool
) -> Tensor:
    """GiGPO (arXiv 2505.10978): the episode relative to its group, plus each turn relative to the turns taken from the same
    state by trajectories of the same group. Equal states of different problems are never compared."""
    relative = _standardized if scale_by_std else centred_by
    num_groups = _num_groups(inputs)
    episode_S = relative(inputs.rewards_S, inputs.group_S, num_groups)
    state_T, num_states = number_pairs(inputs.group_S[inputs.sequence_T], inputs.state_T)
    step_T = relative(_turn_returns(inputs, discount), state_T, num_states)
    return episode_weight * episode_S[inputs.sequence_N] + step_weight * step_T[inputs.turn_N] + _token_returns(inputs)


def reverse_kl_to_teachers(inputs: AdvantageInputs) -> Tensor:
    """Negative sampled reverse KL to the teachers, token by token, for on-policy distillation: sum over teachers of weight *
    (log teacher - log student). Its policy gradient is that of the reverse KL (arXiv 2306.13649)."""
    assert inputs.teacher_logprobs_KN is not None, "teacher logprobs were not computed"
    assert inputs.teacher_weights_KN is not None
    assert inputs.sampler_logprobs_N is not None
    credit_KN = inputs.teacher_weights_KN * (inputs.teacher_logprobs_KN - inputs.sampler_logprobs_N)
    # Outside its domains a teacher's logprobs may be anything, even not a number.
    return torch.where(inputs.teacher_weights_KN > 0, credit_KN, torch.zeros_like(credit_KN)).sum(0)


def distilled_and_rewarded(inputs: AdvantageInputs, *, reward_weight: float) -> Tensor:
    """Mixed distillation: GRPO's advantage with a weight, plus the negative reverse KL to the teachers."""
    return reward_weight * group_normalized(inputs) + reverse_kl_to_teachers(inputs)


def whitened(values_N: Tensor) -> Tensor:
    """Values standardised to mean 0 and (unbiased) standard deviation 1 over all tokens; equal values give exactly zero."""
    if not len(values_N):
        return values_N
    return _standardized(values_N, torch.zeros(len(values_N), dtype=torch.long, device=values_N.device), 1)


def _standardized(values_X: Tensor, group_X: Tensor, num_groups: int) -> Tensor:
    std_G = std_by(values_X, group_X, num_groups)
    return centred_by(values_X, group_X, num_groups) / (std_G[group_X] + STD_EPSILON)


def _num_groups(inputs: AdvantageInputs) -> int:
    return int(inputs.group_S.max()) + 1


def _centred(inputs: AdvantageInputs) -> Tensor:
    return centred_by(inputs.rewards_S, inputs.group_S, _num_groups(inputs))


def _returns(outcome_S: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Outcome of each token's trajectory, plus the returns of token rewards."""
    return outcome_S[inputs.sequence_N] + _token_returns(inputs)


def _paid_per_token(outcome_S: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Reward paid at each token: turn rewards at the end of their turns, the rest of the outcome at the last token."""
    paid_N = inputs.token_rewards_N if inputs.token_rewards_N is not None else outcome_S.new_zeros(len(inputs.sequence_N))
    # (A turn is never without tokens, nor is a trajectory: both would have nothing to train.)
    in_turns_S = sum_by(inputs.turn_rewards_T, inputs.sequence_T, inputs.num_sequences)
    paid_N = paid_N.index_add(0, last_of(inputs.turn_N, inputs.num_turns), inputs.turn_rewards_T)
    return paid_N.index_add(0, last_of(inputs.sequence_N, inputs.num_sequences), outcome_S - in_turns_S)


def _turn_returns(inputs: AdvantageInputs, discount: float) -> Tensor:
    in_turns_S = sum_by(inputs.turn_rewards_T, inputs.sequence_T, inputs.num_sequences)
    last_T = last_of(inputs.sequence_T, inputs.num_sequences)
    paid_T = inputs.turn_rewards_T.index_add(0, last_T, inputs.rewards_S - in_turns_S)
    return discounted_sums(paid_T, inputs.sequence_T, inputs.num_sequences, discount)


def _token_returns(inputs: AdvantageInputs) -> Tensor:
    """Undiscounted returns of token rewards; zero if there are none."""
    if inputs.token_rewards_N is None:
        return inputs.rewards_S.new_zeros(())
    return discounted_sums(inputs.token_rewards_N, inputs.sequence_N, inputs.num_sequences, 1.0)
