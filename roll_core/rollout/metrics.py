"""What a batch of trajectories says about the policy, in numbers."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from roll_core.rollout.lifecycle import AttemptLife, Page, State
from roll_core.types.manifest import DrawOutcome, Metrics
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Trajectory


def describe(trajectories: Sequence[Trajectory], weights_version: int) -> Metrics:
    """Rewards, accuracy, lengths, staleness and failures of one batch. Means are over graded trajectories; greedy baselines
    are not part of them. Groups that were replaced are counted elsewhere (`rollout/failed_groups`)."""
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


def describe_page(page: Page) -> Metrics:
    """What a batch took: draws by outcome, attempts and tokens that nobody trains on, seconds an attempt waited and worked.

    Redundancy prefers what is quick. By how much shows in the two means over sampled attempts: those consumed, and all that
    were generated, an aborted one with the tokens it had.
    """
    groups = page.groups
    outcomes = [group.outcome for group in groups]
    batch = [life for group in groups if group.outcome is DrawOutcome.TRAINED for life in group.consumed]
    every = [life for group in groups for life in group.attempts]
    seconds = _seconds_by_state(batch)
    return {
        "rollout/drawn_groups": float(len(groups)),
        "rollout/filtered_groups": float(outcomes.count(DrawOutcome.FILTERED)),
        "rollout/failed_groups": float(outcomes.count(DrawOutcome.FAILED)),
        "rollout/aborted_groups": float(outcomes.count(DrawOutcome.ABORTED)),
        "rollout/aborted_attempts": float(sum(life.state is State.ABORTED for life in every)),
        "rollout/wasted_tokens": float(sum(life.num_tokens for life in every) - sum(life.num_tokens for life in batch)),
        "rollout/mean_tokens_consumed": _mean_tokens(batch),
        "rollout/mean_tokens_generated": _mean_tokens(every),
        "rollout/mean_seconds_queued": seconds[State.QUEUED] / max(1, len(batch)),
        "rollout/mean_seconds_generating": seconds[State.GENERATING] / max(1, len(batch)),
        "rollout/mean_seconds_grading": seconds[State.GRADING] / max(1, len(batch)),
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


def _mean_tokens(lives: Iterable[AttemptLife]) -> float:
    tokens = [life.num_tokens for life in lives if life.num_tokens and life.place[1] != GREEDY_ATTEMPT]
    return _mean(tokens) if tokens else 0.0


def _seconds_by_state(lives: Iterable[AttemptLife]) -> dict[State, float]:
    """Time in each state, of all lives and all visits to it together."""
    seconds = dict.fromkeys(State, 0.0)
    for life in lives:
        for (state, since), (_, until) in pairwise(life.history):
            seconds[state] += until - since
    return seconds


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
