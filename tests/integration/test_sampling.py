"""Dynamic sampling and redundancy, in real runs."""

from collections import Counter

from roll_core.data.ledger import ledger
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import decode_trajectories
from roll_core.types.manifest import DrawOutcome


def test_groups_that_teach_nothing_are_replaced_and_the_ledger_shows_them(workspace):
    done = workspace.roll(
        "run",
        str(workspace.config),
        *("--set", "reward={kind: exact_match, partial_credit: 0.0}"),
        *("--set", "warm_start={steps: 60}"),
        *(
            "--set",
            "rollout={num_groups: 4, group_size: 4, max_new_tokens: 5, filter: {equal_rewards: true}, max_draws: 100}",
        ),
    )
    assert done.returncode == 0, done.stdout
    chain = workspace.chain()
    assert [m.iteration for m in chain] == [0, 1, 2, 3]
    draws = ledger(chain)
    assert [draw.problem for draw in draws] == list(range(chain[-1].next_problem)), "each problem is drawn once"
    outcomes = Counter(draw.outcome for draw in draws)
    assert outcomes[DrawOutcome.TRAINED] == 3 * 4
    assert outcomes[DrawOutcome.FILTERED] == len(draws) - 3 * 4 > 0
    store = ObjectStore(f"file://{workspace.folder}/roll-data/store")
    for manifest in chain[1:]:
        assert manifest.metrics["reward/informative_groups"] == 1.0
        assert manifest.metrics["rollout/filtered_groups"] == manifest.draws.outcomes.count("f")
        stored = {t.group for t in decode_trajectories(store.get(manifest.collected.trajectories))}
        assert stored == {group for group, letter in enumerate(manifest.draws.outcomes) if letter == "t"}


def test_a_run_with_redundancy_aborts_what_is_late_and_goes_on(workspace):
    done = workspace.roll(
        "run",
        str(workspace.config),
        *("--set", "problems={kind: arithmetic, puzzle: sort, digits: 5}"),
        *("--set", "rollout={num_groups: 4, group_size: 4, max_new_tokens: 16, redundant_groups: 4, redundant_attempts: 4}"),
    )
    assert done.returncode == 0, done.stdout
    for manifest in workspace.chain()[1:]:
        assert Counter(manifest.draws.outcomes)["t"] == 4
        assert manifest.metrics["rollout/drawn_groups"] == len(manifest.draws.outcomes) == 8
        assert (
            0 < manifest.metrics["rollout/aborted_attempts"] <= 8 * 8 - 4 * 4
        )  # some had their grades, and their group came late
        assert manifest.metrics["rollout/wasted_tokens"] > 0
        assert manifest.collected.num_trajectories == 4 * 4
