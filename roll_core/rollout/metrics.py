"""Metrics of a batch of trajectories and of its ledger page. Used by the rollout scheduler and its role."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from roll_core.rollout.lifecycle import AttemptState, LedgerPage, Phase
from roll_core.types.manifest import DrawOutcome, Metrics
from roll_core.types.trajectory import GREEDY_ATTEMPT, Ending, Trajectory


def batch_metrics(trajectories: Sequence[Trajectory], weights_version: int) -> Metrics:
    """Compute the rewards, accuracy, lengths, staleness and failures of one batch.

    Means are over graded trajectories, without greedy baselines. Replaced groups are counted in `page_metrics`
    (`rollout/failed_groups`).
    """
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
        **_percentiles("response/{}_tokens", lengths),
        "rollout/staleness_max": float(max(staleness, default=0)),
        "rollout/staleness_mean": _mean(staleness) if staleness else 0.0,
        **{f"rollout/tokens_{age}_stale": count / len(staleness) for age, count in sorted(Counter(staleness).items())},
    }


def page_metrics(page: LedgerPage) -> Metrics:
    """Compute what a batch cost: draws by outcome, attempts and tokens that are not trained on, seconds an attempt waited
    and worked.

    Redundancy favours short completions. The bias shows in the lengths of sampled attempts, consumed ones against all that
    were drawn (an aborted one counts with the tokens it had): two means and the Kolmogorov-Smirnov distance of the two
    distributions (0 to 1).
    """
    groups = page.groups
    outcomes = [group.outcome for group in groups]
    batch = [attempt for group in groups if group.outcome is DrawOutcome.TRAINED for attempt in group.consumed]
    every = [attempt for group in groups for attempt in group.attempts]
    seconds = _seconds_by_phase(batch)
    lengths = _lengths(batch)
    return {
        "rollout/drawn_groups": float(len(groups)),
        "rollout/filtered_groups": float(outcomes.count(DrawOutcome.FILTERED)),
        "rollout/failed_groups": float(outcomes.count(DrawOutcome.FAILED)),
        "rollout/aborted_groups": float(outcomes.count(DrawOutcome.ABORTED)),
        "rollout/aborted_attempts": float(sum(attempt.phase is Phase.ABORTED for attempt in every)),
        "rollout/interruptions": float(sum(max(0, len(attempt.spans) - 1) for attempt in every)),
        **_wasted_tokens(page),
        "rollout/mean_tokens_consumed": _mean(lengths) if lengths else 0.0,
        "rollout/mean_tokens_generated": _mean(_lengths(every)) if _lengths(every) else 0.0,
        "rollout/length_distance": _ks_distance(lengths, _lengths(every)),
        **_percentiles("rollout/{}_seconds", [attempt.history[-1][1] - attempt.history[0][1] for attempt in batch]),
        "rollout/mean_seconds_queued": seconds[Phase.QUEUED] / max(1, len(batch)),
        "rollout/mean_seconds_generating": seconds[Phase.GENERATING] / max(1, len(batch)),
        "rollout/mean_seconds_grading": seconds[Phase.GRADING] / max(1, len(batch)),
    }


def accuracy(trajectories: Sequence[Trajectory]) -> float:
    """Share of correct answers among all trajectories of an evaluation; one without a grade counts as wrong."""
    return _mean([t.score is not None and t.score.correct for t in trajectories])


def _informative_share(trajectories: Sequence[Trajectory]) -> float:
    """Share of groups whose rewards differ; equal rewards give a group-relative method no gradient."""
    rewards_of: dict[int, set[float]] = {}
    for t in trajectories:
        if t.score is not None:
            rewards_of.setdefault(t.group, set()).add(t.score.value)
    return _mean([len(rewards) > 1 for rewards in rewards_of.values()])


def _lengths(attempts: Iterable[AttemptState]) -> list[int]:
    """Token counts of the sampled attempts that have tokens."""
    return [attempt.num_tokens for attempt in attempts if attempt.num_tokens and attempt.attempt_id[1] != GREEDY_ATTEMPT]


def _ks_distance(some: Sequence[int], others: Sequence[int]) -> float:
    """Kolmogorov-Smirnov distance: the largest difference of two empirical distribution functions."""
    if not some or not others:
        return 0.0
    some, others = sorted(some), sorted(others)
    lengths = {*some, *others}
    return max(abs(bisect_right(some, at) / len(some) - bisect_right(others, at) / len(others)) for at in lengths)


def _wasted_tokens(page: LedgerPage) -> Metrics:
    """Count tokens that are not trained on, by cause: group filtered out, failed (group or attempt alone), or aborted."""
    wasted = dict.fromkeys(("filtered", "failed", "aborted"), 0)
    for group in page.groups:
        for attempt in group.attempts:
            if attempt.phase is Phase.ABORTED or group.outcome is DrawOutcome.ABORTED:
                wasted["aborted"] += attempt.num_tokens
            elif group.outcome is DrawOutcome.FILTERED:
                wasted["filtered"] += attempt.num_tokens
            elif group.outcome is DrawOutcome.FAILED or attempt.phase is Phase.ABANDONED:
                wasted["failed"] += attempt.num_tokens
    return {f"rollout/wasted_tokens_{why}": float(count) for why, count in wasted.items()} | {
        "rollout/wasted_tokens": float(sum(wasted.values()))
    }


def _percentiles(name: str, values: Sequence[float]) -> Metrics:
    """p50, p90 and p99 under `name`, whose `{}` is replaced with the percentile."""
    ranked = sorted(values)
    return {
        name.format(f"p{percent}"): float(ranked[min(len(ranked) - 1, len(ranked) * percent // 100)])
        for percent in ((50, 90, 99) if ranked else ())
    }


def _seconds_by_phase(attempts: Iterable[AttemptState]) -> dict[Phase, float]:
    """Seconds in each phase, summed over all attempts and all visits."""
    seconds = dict.fromkeys(Phase, 0.0)
    for attempt in attempts:
        for (phase, since), (_, until) in pairwise(attempt.history):
            seconds[phase] += until - since
    return seconds


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
