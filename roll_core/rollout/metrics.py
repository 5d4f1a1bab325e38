"""What a batch of trajectories says about the policy, in numbers."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from roll_core.rollout.lifecycle import AttemptState, Page, Phase
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
        **_tail("response/{}_tokens", lengths),
        "rollout/staleness_max": float(max(staleness, default=0)),
        "rollout/staleness_mean": _mean(staleness) if staleness else 0.0,
        **{f"rollout/tokens_{age}_stale": count / len(staleness) for age, count in sorted(Counter(staleness).items())},
    }


def describe_page(page: Page) -> Metrics:
    """What a batch took: draws by outcome, attempts and tokens that nobody trains on, seconds an attempt waited and worked.

    Redundancy prefers what is quick. By how much shows in the lengths of sampled attempts, those consumed and all that were
    drawn, an aborted one with the tokens it had: two means, and how far apart the two distributions are (0 to 1, the largest
    difference of the shares that are no longer than something, as Kolmogorov and Smirnov have it).
    """
    groups = page.groups
    outcomes = [group.outcome for group in groups]
    batch = [life for group in groups if group.outcome is DrawOutcome.TRAINED for life in group.consumed]
    every = [life for group in groups for life in group.attempts]
    seconds = _seconds_by_state(batch)
    lengths = _lengths(batch)
    return {
        "rollout/drawn_groups": float(len(groups)),
        "rollout/filtered_groups": float(outcomes.count(DrawOutcome.FILTERED)),
        "rollout/failed_groups": float(outcomes.count(DrawOutcome.FAILED)),
        "rollout/aborted_groups": float(outcomes.count(DrawOutcome.ABORTED)),
        "rollout/aborted_attempts": float(sum(life.state is Phase.ABORTED for life in every)),
        "rollout/interruptions": float(sum(max(0, len(life.spans) - 1) for life in every)),
        **_wasted_tokens(page),
        "rollout/mean_tokens_consumed": _mean(lengths) if lengths else 0.0,
        "rollout/mean_tokens_generated": _mean(_lengths(every)) if _lengths(every) else 0.0,
        "rollout/length_distance": _distance(lengths, _lengths(every)),
        **_tail("rollout/{}_seconds", [life.history[-1][1] - life.history[0][1] for life in batch]),
        "rollout/mean_seconds_queued": seconds[Phase.QUEUED] / max(1, len(batch)),
        "rollout/mean_seconds_generating": seconds[Phase.GENERATING] / max(1, len(batch)),
        "rollout/mean_seconds_grading": seconds[Phase.GRADING] / max(1, len(batch)),
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


def _lengths(lives: Iterable[AttemptState]) -> list[int]:
    return [life.num_tokens for life in lives if life.num_tokens and life.place[1] != GREEDY_ATTEMPT]


def _distance(some: Sequence[int], others: Sequence[int]) -> float:
    if not some or not others:
        return 0.0
    some, others = sorted(some), sorted(others)
    places = {*some, *others}
    return max(abs(bisect_right(some, at) / len(some) - bisect_right(others, at) / len(others)) for at in places)


def _wasted_tokens(page: Page) -> Metrics:
    """Tokens that nobody trains on, by why: their group was left out or failed, they were redundant, or failed alone."""
    wasted = dict.fromkeys(("filtered", "failed", "aborted"), 0)
    for group in page.groups:
        for life in group.attempts:
            if life.state is Phase.ABORTED or group.outcome is DrawOutcome.ABORTED:
                wasted["aborted"] += life.num_tokens
            elif group.outcome is DrawOutcome.FILTERED:
                wasted["filtered"] += life.num_tokens
            elif group.outcome is DrawOutcome.FAILED or life.state is Phase.ABANDONED:
                wasted["failed"] += life.num_tokens
    return {f"rollout/wasted_tokens_{why}": float(count) for why, count in wasted.items()} | {
        "rollout/wasted_tokens": float(sum(wasted.values()))
    }


def _tail(name: str, values: Sequence[float]) -> Metrics:
    """Percentiles, under a name with a gap for p50, p90 and p99."""
    ranked = sorted(values)
    return {
        name.format(f"p{percent}"): float(ranked[min(len(ranked) - 1, len(ranked) * percent // 100)])
        for percent in ((50, 90, 99) if ranked else ())
    }


def _seconds_by_state(lives: Iterable[AttemptState]) -> dict[Phase, float]:
    """Time in each state, of all lives and all visits to it together."""
    seconds = dict.fromkeys(Phase, 0.0)
    for life in lives:
        for (state, since), (_, until) in pairwise(life.history):
            seconds[state] += until - since
    return seconds


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
