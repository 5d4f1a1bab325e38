"""Asynchronous runs with real processes: staleness of tokens, engines that work during updates, and what survives kills.

Where tokens do not matter, engines and trainer rehearse: completions and updates take as long as the test needs.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from roll_core.reporting.stage_log import Edge, read_stages
from roll_core.rollout.journal import Journal
from roll_core.rollout.lifecycle import AttemptId
from roll_core.seeds import derive_seed
from roll_core.store.records.rollouts import decode_trajectories
from roll_core.store.records.traces import decode_trace
from roll_core.types.leg import LegEnding
from roll_core.types.manifest import Manifest
from roll_core.types.trace import AttemptTrace, Fate, Span
from roll_core.types.trajectory import Trajectory
from tests.integration.conftest import Workspace
from tests.integration.faulty_roles import RecordingEngine, use
from tests.support import wait_until

APART = ("cluster={devices_per_node: 2, threads_per_device: 1}", "placement={trainer: [0], engines: [1]}")


def trajectories_of(workspace: Workspace, manifest: Manifest) -> dict[AttemptId, Trajectory]:
    """Trajectories of an iteration by problem and attempt."""
    decoded = decode_trajectories(workspace.store.get(manifest.collected.trajectories))
    return {(manifest.draws.first + t.group, t.attempt): t for t in decoded}


def read_trace(workspace: Workspace, manifest: Manifest) -> list[AttemptTrace]:
    return decode_trace(workspace.store.get(manifest.collected.trace))


def versions_of(trajectory: Trajectory) -> list[int]:
    return [version for turn in trajectory.turns for version in turn.weights_versions]


def staleness_of(workspace: Workspace, chain: list[Manifest]) -> set[int]:
    """Staleness of all tokens that were trained on."""
    return {
        manifest.collected.request.weights_version - version
        for manifest in chain[1:]
        for trajectory in trajectories_of(workspace, manifest).values()
        for version in versions_of(trajectory)
    }


def ledger_of(workspace: Workspace, chain: list[Manifest]) -> list[tuple[str, list[str]]]:
    """Draws of every iteration, and the problems of its trajectories."""
    return [
        (manifest.draws.model_dump_json(), [t.problem_id for t in trajectories_of(workspace, manifest).values()])
        for manifest in chain[1:]
    ]


def assert_no_gaps(chain: list[Manifest]) -> None:
    """Every problem is drawn once and trained on."""
    for number, manifest in enumerate(chain[1:]):
        assert (manifest.draws.first, manifest.draws.outcomes) == (4 * number, "tttt")


# ------------------------------------------------------------------------------------------ the torch engine


def test_an_asynchronous_run_is_as_stale_as_it_may_be_and_can_be_replayed(workspace):
    chain = workspace.train(*APART, "iterations=6", "rollout.async_ratio=2")
    assert [manifest.iteration for manifest in chain] == list(range(7))
    assert_no_gaps(chain)
    staleness = staleness_of(workspace, chain)
    assert staleness <= {0, 1, 2}
    assert max(staleness) > 0, "nothing was generated ahead of training"
    for manifest in chain[1:]:
        trajectories = trajectories_of(workspace, manifest)
        traced = {(attempt.problem, attempt.attempt): attempt for attempt in read_trace(workspace, manifest)}
        assert traced.keys() == trajectories.keys()
        for attempt_id, attempt in traced.items():
            assert attempt.fate is Fate.TRAINED
            assert attempt.num_tokens == trajectories[attempt_id].num_completion_tokens
            assert attempt.num_prompt_tokens == len(trajectories[attempt_id].turns[0].prompt_ids)
            assert attempt.oldest_version == min(versions_of(trajectories[attempt_id]))
            assert {span.engine for span in attempt.spans} == {"engine 0"}
            assert attempt.drawn_at <= attempt.spans[0].begin <= attempt.spans[-1].end <= attempt.graded_at
            assert attempt.graded_at <= attempt.consumed_at
    replayed = workspace.replay("tiny-1", 5)
    assert "weights digest" in replayed.compared
    assert replayed.differences == ()


# ------------------------------------------------------------------------------------------ kills

ITERATIONS = 12
IN_SLOTS = (
    f"iterations={ITERATIONS}",
    "model.max_positions=64",
    "inference={kind: rehearsal, seconds_per_token: 0.02, median_tokens: 20, sigma: 0.5}",
    "training={backend: rehearsal}",
    "rollout={num_groups: 4, group_size: 4, max_new_tokens: 48, slots_per_engine: 8, async_ratio: 2}",
    "evaluation={every: 99, num_problems: 2}",
    "store.unfinished_seconds=0",
    "deadlines.heartbeat=8",
)
"""Sixteen attempts an iteration, eight at a time, about 0.4 s each: a run cannot end before it is killed."""


@dataclass(frozen=True)
class Broken:
    """A run whose roles were killed in its first leg."""

    workspace: Workspace
    before_scheduler_died: list[Manifest]
    kept: set[AttemptId]
    """Attempts that were finished, not trained on, and in the journal when the scheduler died."""
    seeds_afterwards: set[int]
    """Seeds of all attempts that were generated after that."""


@pytest.fixture(scope="module")
def broken(new_workspace) -> Broken:
    """tiny-1: a reward worker dies, then an engine, its replacement hangs, then the scheduler dies; leg 2 finishes."""
    workspace = new_workspace("broken")
    run = workspace.open(*APART, *IN_SLOTS)
    kept: set[AttemptId] = set()

    def kill_scheduler() -> None:
        wait_until(lambda: is_ahead(workspace), "attempts are finished ahead of training")
        workspace.kill("rollout scheduler")
        next_problem = workspace.chain()[-1].next_problem
        kept.update(each for each in Journal(workspace.store, "tiny-1", 0.0).read() if each[0] >= next_problem)
        workspace.seeds_generated()

    with pytest.MonkeyPatch.context() as patch:
        use(patch, RecordingEngine)
        with (
            workspace.when_committed(1, lambda: workspace.kill("reward worker 0")),
            workspace.when_committed(2, lambda: workspace.kill("engine 0")),
            workspace.when_committed(4, lambda: workspace.kill("engine 0", signal.SIGSTOP)),
            workspace.when_committed(6, kill_scheduler),
        ):
            ended = workspace.run_leg(run)
        assert ended.ending is LegEnding.FAILED
        assert "rollout scheduler died" in ended.cause
        before = workspace.chain()
        assert workspace.run_leg(run, leg=2).ending is LegEnding.FINISHED
    return Broken(workspace, before, kept, {int(seed) for seed in workspace.seeds_generated()})


def is_ahead(workspace: Workspace) -> bool:
    """True if the journal has more than four files of problems that no iteration has used."""
    firsts = [int(name.partition("-")[0]) for name in workspace.store.list("runs/tiny-1/unfinished")]
    return sum(first >= workspace.chain()[-1].next_problem for first in firsts) > 4


def test_a_reward_worker_and_engines_that_die_or_hang_are_replaced_inside_the_leg(broken):
    assert broken.before_scheduler_died[-1].iteration >= 6
    assert {manifest.leg for manifest in broken.before_scheduler_died} == {1}


def test_a_scheduler_that_dies_costs_a_leg_and_nothing_that_was_finished(broken):
    later = broken.workspace.chain()[len(broken.before_scheduler_died) :]
    assert {manifest.leg for manifest in later} == {2}
    assert broken.kept
    assert broken.seeds_afterwards, "nothing was generated after the scheduler died"
    assert not broken.seeds_afterwards & {derive_seed(0, "attempt", *attempt_id) for attempt_id in broken.kept}


def test_after_all_kills_every_problem_was_trained_on_once_as_in_a_run_without_any(broken):
    workspace = broken.workspace
    chain = workspace.chain("tiny-1")
    assert [manifest.iteration for manifest in chain] == list(range(ITERATIONS + 1))
    assert_no_gaps(chain)
    assert ledger_of(workspace, chain) == ledger_of(workspace, workspace.train(*APART, *IN_SLOTS))
    assert staleness_of(workspace, chain) <= {0, 1, 2}


# ------------------------------------------------------------------------------------------ devices that are shared

LONG = (
    "iterations=5",
    "model.max_positions=256",
    "inference={kind: rehearsal, seconds_per_token: 0.01, median_tokens: 200, sigma: 0.0}",
    "training={backend: rehearsal, seconds_per_token: 1.0e-4}",
    "evaluation={every: 99, num_problems: 2}",
    "cluster={devices_per_node: 2, threads_per_device: 1}",
)
"""Every attempt takes 2 s and every update 0.3 s: weights change under attempts in flight."""


def train_with_long_attempts(workspace: Workspace, engines: str, in_flight: str) -> list[Manifest]:
    rollout = f"{{num_groups: 4, group_size: 4, max_new_tokens: 240, async_ratio: 1, in_flight: {in_flight}}}"
    chain = workspace.train(*LONG, f"rollout={rollout}", f"placement={{trainer: [0], engines: {engines}}}")
    assert [manifest.iteration for manifest in chain] == list(range(6))
    assert_no_gaps(chain)
    assert staleness_of(workspace, chain) == {0, 1}
    return chain


def update_intervals(workspace: Workspace) -> list[tuple[float, float]]:
    """Begin and end of every update, in seconds since the epoch."""
    events = [e for e in read_stages(workspace.folder / "roll-data/work/tiny-1") if e.stage == "update"]
    begins = [event.at.timestamp() for event in events if event.edge is Edge.BEGIN]
    ends = [event.at.timestamp() for event in events if event.edge is Edge.END]
    return list(zip(begins, ends, strict=True))


def worked_during_updates(workspace: Workspace, chain: list[Manifest]) -> set[str]:
    """Engines that generated during an update."""
    updates = update_intervals(workspace)

    def overlaps(span: Span) -> bool:
        return any(span.begin < end and begin < span.end for begin, end in updates)

    traces = (attempt for manifest in chain[1:] for attempt in read_trace(workspace, manifest))
    return {span.engine for attempt in traces for span in attempt.spans if overlaps(span)}


def worked_after_the_first_update(workspace: Workspace, chain: list[Manifest]) -> set[str]:
    _, end = update_intervals(workspace)[0]
    traces = (attempt for manifest in chain[1:] for attempt in read_trace(workspace, manifest))
    return {span.engine for attempt in traces for span in attempt.spans if span.begin > end}


def count(workspace: Workspace, chain: list[Manifest], holds: Callable[[AttemptTrace, Trajectory], bool]) -> int:
    """Number of attempts for which a predicate holds."""
    return sum(
        holds(attempt, trajectories_of(workspace, manifest)[attempt.problem, attempt.attempt])
        for manifest in chain[1:]
        for attempt in read_trace(workspace, manifest)
    )


def was_resumed(attempt: AttemptTrace, trajectory: Trajectory) -> bool:
    """True if an attempt has tokens of several visits to engines; it is as long as if there had been one."""
    assert trajectory.num_completion_tokens == attempt.num_tokens == 200
    return sum(span.num_tokens > 0 for span in attempt.spans) > 1


def continued(attempt: AttemptTrace, trajectory: Trajectory) -> bool:
    """True if an attempt has tokens of several weights versions from one visit to an engine."""
    return len(attempt.spans) == 1 and len(set(versions_of(trajectory))) > 1


def test_engines_on_the_trainers_device_make_room_and_resume_their_attempts(workspace):
    chain = train_with_long_attempts(workspace, "[0]", "resume")
    assert worked_during_updates(workspace, chain) == set()
    assert count(workspace, chain, was_resumed) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("in_flight", "holds"), [("resume", was_resumed), ("continue", continued)])
def test_of_two_engines_the_one_on_the_trainers_device_makes_room_and_the_other_keeps_generating(
    workspace, in_flight, holds
):
    chain = train_with_long_attempts(workspace, "[0, 1]", in_flight)
    assert worked_during_updates(workspace, chain) == {"engine 1"}
    assert worked_after_the_first_update(workspace, chain) == {"engine 0", "engine 1"}
    assert count(workspace, chain, holds) > 0
