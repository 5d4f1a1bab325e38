"""What a batch of trajectories says about the policy, in numbers."""

from collections.abc import Sequence

from roll_core.types.manifest import Metrics
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Trajectory


def describe(trajectories: Sequence[Trajectory], weights_version: int) -> Metrics:
    """Rewards, accuracy, lengths, staleness and failures of one batch. Means are over graded trajectories; greedy baselines
    are not part of them."""
    trajectories = [t for t in trajectories if t.attempt != GREEDY_ATTEMPT]
    graded = [(t, t.score) for t in trajectories if t.score is not None]
    quarantined = {t.group for t in trajectories} - {t.group for t, _ in graded}
    metrics = {"rollout/failed": float(len(trajectories) - len(graded)), "problem/quarantined": float(len(quarantined))}
    if not graded:
        return metrics
    rewards = [score.value for _, score in graded]
    lengths = [t.num_completion_tokens for t, _ in graded]
    staleness = [weights_version - v for t, _ in graded for turn in t.turns for v in turn.weights_versions]
    return metrics | {
        "reward/mean": _mean(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/informative_groups": _informative_share(trajectories),
        "accuracy/train": _mean([score.correct for _, score in graded]),
        "response/mean_tokens": _mean(lengths),
        "response/max_tokens": float(max(lengths)),
        "response/truncated": _mean([t.ending is Ending.LENGTH for t, _ in graded]),
        "rollout/staleness_max": float(max(staleness, default=0)),
    }


def accuracy(trajectories: Sequence[Trajectory]) -> float:
    """Share of right answers among the graded ones; those that could not be graded are counted elsewhere."""
    return _mean([t.score.correct for t in trajectories if t.score is not None])


def _informative_share(trajectories: Sequence[Trajectory]) -> float:
    """Share of groups whose rewards differ: the others teach a group-relative method nothing."""
    rewards_of: dict[int, set[float]] = {}
    for t in trajectories:
        if t.score is not None:
            rewards_of.setdefault(t.group, set()).add(t.score.value)
    return _mean([len(rewards) > 1 for rewards in rewards_of.values()])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
