"""Dynamic sampling and redundancy, in real runs."""

from collections import Counter

from roll_core.data.ledger import ledger
from roll_core.store.records.rollouts import decode_trajectories
from roll_core.types.manifest import DrawOutcome


def test_groups_that_teach_nothing_are_replaced_and_the_ledger_shows_them(workspace):
    chain = workspace.train(
        "reward={kind: exact_match, partial_credit: 0.0}",
        "warm_start={steps: 60}",
        "rollout={num_groups: 4, group_size: 4, max_new_tokens: 5, filter: {equal_rewards: true}, max_draws: 100}",
    )
    assert [m.iteration for m in chain] == [0, 1, 2, 3]
    draws = ledger(chain)
    assert [draw.problem for draw in draws] == list(range(chain[-1].next_problem)), "each problem is drawn once"
    outcomes = Counter(draw.outcome for draw in draws)
    assert outcomes[DrawOutcome.TRAINED] == 3 * 4
    assert outcomes[DrawOutcome.FILTERED] == len(draws) - 3 * 4 > 0
    for manifest in chain[1:]:
        assert manifest.metrics["reward/informative_groups"] == 1.0
        assert manifest.metrics["rollout/filtered_groups"] == manifest.draws.outcomes.count("f")
        stored = {t.group for t in decode_trajectories(workspace.store.get(manifest.collected.trajectories))}
        assert stored == {group for group, letter in enumerate(manifest.draws.outcomes) if letter == "t"}


def test_a_run_with_redundancy_aborts_late_attempts_and_continues(workspace):
    chain = workspace.train(
        "inference={kind: rehearsal, seconds_per_token: 0.01, median_tokens: 8, sigma: 1.0}",
        "training={backend: rehearsal}",
        "model.max_positions=64",
        "rollout={num_groups: 4, group_size: 4, max_new_tokens: 48, redundant_groups: 4, redundant_attempts: 4}",
    )
    for manifest in chain[1:]:
        assert Counter(manifest.draws.outcomes)["t"] == 4
        assert manifest.metrics["rollout/drawn_groups"] == len(manifest.draws.outcomes) == 8
        # Attempts that had a grade before their group was aborted do not count.
        assert 0 < manifest.metrics["rollout/aborted_attempts"] <= 8 * 8 - 4 * 4
        assert manifest.metrics["rollout/wasted_tokens"] > 0
        assert manifest.collected.num_trajectories == 4 * 4
