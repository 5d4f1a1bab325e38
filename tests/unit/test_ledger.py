"""Ledger: every draw has one outcome, and the next iteration draws after the last one."""

from dataclasses import replace

import pytest

from roll_core.data.ledger import ledger, resolve_draws, totals
from roll_core.types.manifest import Collected, CollectRequest, DrawOutcome, Draws, Manifest
from roll_core.types.refs import ArtifactKind, ArtifactRef
from roll_core.types.trajectory import Ending, Failure
from tests.stored_runs import bare_manifest
from tests.support import trajectory

REQUEST = CollectRequest(iteration=3, parent="", weights_version=2, first_problem=8, num_groups=4)


def collected(outcomes: str) -> Collected:
    return Collected(
        request=REQUEST,
        trajectories=ArtifactRef(digest="0" * 64, kind=ArtifactKind.TRAJECTORIES, size=0),
        num_trajectories=0,
        num_failed=0,
        num_tokens=0,
        draws=Draws(first=8, outcomes=outcomes),
        trace=ArtifactRef(digest="0" * 64, kind=ArtifactKind.TRACE, size=0),
    )


def test_each_draw_has_the_outcome_of_its_group():
    aborted = replace(trajectory(3, 0, None), ending=Ending.ABORTED, failure=Failure("generate", "aborted"))
    trajectories = [trajectory(0, 0, 1.0), trajectory(0, 1, None), trajectory(1, 0, 0.0), trajectory(2, 0, None), aborted]
    draws = resolve_draws(collected("tttt"), trajectories, trained_groups={0})
    assert draws == Draws(first=8, outcomes="tfxa")
    assert draws.next == 12
    assert [(draw.problem, draw.iteration, draw.outcome) for draw in draws.expand(3)] == [
        (8, 3, DrawOutcome.TRAINED),
        (9, 3, DrawOutcome.FILTERED),
        (10, 3, DrawOutcome.FAILED),
        (11, 3, DrawOutcome.ABORTED),
    ]


def test_draws_that_were_rejected_while_collecting_keep_their_outcome_and_the_next_iteration_draws_after_them():
    trajectories = [trajectory(1, 0, 1.0), trajectory(4, 0, 0.5), trajectory(5, 0, None)]
    draws = resolve_draws(collected("ftxattaa"), trajectories, trained_groups={1})
    assert draws == Draws(first=8, outcomes="ftxafxaa")
    assert draws.next == 16


def test_every_outcome_has_a_letter_of_its_own():
    assert len({outcome.letter for outcome in DrawOutcome}) == len(DrawOutcome)


@pytest.fixture
def chain() -> list[Manifest]:
    draws_by_iteration = [None, Draws(first=0, outcomes="tt"), Draws(first=2, outcomes="tx")]
    return [bare_manifest(iteration, draws=draws) for iteration, draws in enumerate(draws_by_iteration)]


def test_the_ledger_of_a_run_is_the_draws_of_its_manifests_in_order(chain):
    assert [(draw.problem, draw.iteration) for draw in ledger(chain)] == [(0, 1), (1, 1), (2, 2), (3, 2)]
    assert totals(chain) == "4 drawn: 3 trained, 1 failed"


def test_a_run_without_draws_has_no_totals(chain):
    assert totals(chain[:1]) == ""
