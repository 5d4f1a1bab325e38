"""Asynchronous runs with real processes: how old tokens are, who works while the trainer does, and what is left after kills.

Where tokens do not matter the rehearsal engine generates: its completions take as long as the test needs.
"""

import os
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
from roll_core.types.manifest import Manifest
from roll_core.types.trace import AttemptTrace, Fate, Span
from roll_core.types.trajectory import Trajectory
from tests.integration.conftest import Workspace, wait_until


def settings(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


APART = settings("cluster={devices_per_node: 2, threads_per_device: 1}", "placement={trainer: [0], engines: [1]}")


def trajectories_of(workspace: Workspace, manifest: Manifest) -> dict[AttemptId, Trajectory]:
    """By problem and attempt."""
    decoded = decode_trajectories(workspace.store.get(manifest.collected.trajectories))
    return {(manifest.draws.first + t.group, t.attempt): t for t in decoded}


def read_trace(workspace: Workspace, manifest: Manifest) -> list[AttemptTrace]:
    return decode_trace(workspace.store.get(manifest.collected.trace))


def versions_of(trajectory: Trajectory) -> list[int]:
    return [version for turn in trajectory.turns for version in turn.weights_versions]


def staleness_of(workspace: Workspace, chain: list[Manifest]) -> set[int]:
    """Of all tokens that were trained on."""
    return {
        manifest.collected.request.weights_version - version
        for manifest in chain[1:]
        for trajectory in trajectories_of(workspace, manifest).values()
        for version in versions_of(trajectory)
    }


def ledger_of(workspace: Workspace, chain: list[Manifest]) -> list[tuple[str, list[str]]]:
    """What every iteration drew, and the problems of its trajectories."""
    return [
        (manifest.draws.model_dump_json(), [t.problem_id for t in trajectories_of(workspace, manifest).values()])
        for manifest in chain[1:]
    ]


def refuse_gaps(chain: list[Manifest]) -> None:
    """Every problem is drawn once and trained on."""
    for number, manifest in enumerate(chain[1:]):
        assert (manifest.draws.first, manifest.draws.outcomes) == (4 * number, "tttt")


# ------------------------------------------------------------------------------------------ the torch engine


def test_an_asynchronous_run_is_as_stale_as_it_may_be_and_can_be_replayed(workspace):
    done = workspace.roll("run", str(workspace.config), *APART, *settings("iterations=6", "rollout.async_ratio=2"))
    assert done.returncode == 0, done.stdout
    chain = workspace.chain()
    assert [manifest.iteration for manifest in chain] == list(range(7))
    refuse_gaps(chain)
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
    replayed = workspace.roll("replay", "tiny-1@5")
    assert replayed.returncode == 0, replayed.stdout


# ------------------------------------------------------------------------------------------ kills

ITERATIONS = 12
IN_SLOTS = settings(
    f"iterations={ITERATIONS}",
    "model.max_positions=64",
    "inference={kind: rehearsal, seconds_per_token: 0.02, median_tokens: 20, sigma: 0.5}",
    "rollout={num_groups: 4, group_size: 4, max_new_tokens: 48, slots_per_engine: 8, async_ratio: 2}",
    "evaluation={every: 99, num_problems: 2}",
    "store.unfinished_seconds=0",
    "deadlines.heartbeat=8",
)
"""Sixteen attempts an iteration, eight at a time, each some 0.4 s: a run cannot be over before it is killed."""


@dataclass(frozen=True)
class Broken:
    """A run that was killed here and there, at its end."""

    workspace: Workspace
    before_scheduler_died: list[Manifest]
    kept: set[AttemptId]
    """Finished, not used up, and in the store when the scheduler died."""
    seeds_afterwards: set[int]
    """Of what was generated from then on."""
    before_command_died: list[Manifest]


@pytest.fixture(scope="module")
def broken(new_workspace) -> Broken:
    """A reward worker dies, then an engine, its successor stops to answer, the scheduler dies, at last the command, which is
    resumed."""
    workspace = new_workspace("broken")
    command = workspace.start_with("none", "run", str(workspace.config), *APART, *IN_SLOTS)
    try:
        for iteration, role, fault in (
            (1, "reward worker 0", signal.SIGKILL),
            (2, "engine 0", signal.SIGKILL),
            (4, "engine 0", signal.SIGSTOP),
        ):
            workspace.wait_for_iteration(iteration)
            os.kill(workspace.pid_of(role), fault)
        workspace.wait_for_iteration(6)
        wait_until(lambda: is_ahead(workspace), "something is finished ahead of training")
        os.kill(workspace.pid_of("rollout scheduler"), signal.SIGKILL)
        before = workspace.chain()
        kept = {
            attempt_id
            for attempt_id in Journal(workspace.store, "tiny-1", 0.0).read()
            if attempt_id[0] >= before[-1].next_problem
        }
        workspace.seeds_generated()
        workspace.wait_for_iteration(len(before) + 1)
    finally:
        os.killpg(command.pid, signal.SIGKILL)
        output, _ = command.communicate()
    seeds_afterwards = {int(seed) for seed in workspace.seeds_generated()}
    before_command_died = workspace.chain()
    resumed = workspace.roll("resume", "tiny-1")
    assert resumed.returncode == 0, f"{output}\n{resumed.stdout}"
    return Broken(workspace, before, kept, seeds_afterwards, before_command_died)


def is_ahead(workspace: Workspace) -> bool:
    """By the names of what is kept, which begin with the first problem in it."""
    firsts = [int(name.partition("-")[0]) for name in workspace.store.list("runs/tiny-1/unfinished")]
    return sum(first >= workspace.chain()[-1].next_problem for first in firsts) > 4


def test_a_reward_worker_and_engines_that_die_or_hang_are_replaced_inside_the_leg(broken):
    assert broken.before_scheduler_died[-1].iteration >= 6
    assert {manifest.leg for manifest in broken.before_scheduler_died} == {1}


def test_a_scheduler_that_dies_costs_a_leg_and_nothing_that_was_finished(broken):
    later = broken.before_command_died[len(broken.before_scheduler_died) :]
    assert {manifest.leg for manifest in later} == {2}
    assert broken.kept
    assert broken.seeds_afterwards, "nothing was generated after the scheduler died"
    assert not broken.seeds_afterwards & {derive_seed(0, "attempt", *attempt_id) for attempt_id in broken.kept}


def test_after_all_kills_every_problem_was_trained_on_once_as_in_a_run_without_any(broken):
    workspace = broken.workspace
    assert broken.before_command_died[-1].iteration < ITERATIONS, "the run was over before it could be killed"
    unbroken = workspace.roll("run", str(workspace.config), *APART, *IN_SLOTS)
    assert unbroken.returncode == 0, unbroken.stdout
    chain = workspace.chain("tiny-1")
    assert chain[: len(broken.before_command_died)] == broken.before_command_died
    assert chain[-1].leg == 3
    refuse_gaps(chain)
    assert ledger_of(workspace, chain) == ledger_of(workspace, workspace.chain("tiny-2"))
    assert staleness_of(workspace, chain) <= {0, 1, 2}


# ------------------------------------------------------------------------------------------ devices that are shared

LONG = settings(
    "iterations=5",
    "model.max_positions=256",
    "inference={kind: rehearsal, seconds_per_token: 0.01, median_tokens: 200, sigma: 0.0}",
    "evaluation={every: 99, num_problems: 2}",
    "cluster={devices_per_node: 2, threads_per_device: 1}",
)
"""Every attempt takes two seconds, much longer than all that is between two collects: weights change under some of them."""


def run_of_long_attempts(workspace: Workspace, engines: str, in_flight: str) -> list[Manifest]:
    rollout = f"{{num_groups: 4, group_size: 4, max_new_tokens: 240, async_ratio: 1, in_flight: {in_flight}}}"
    placement = f"{{trainer: [0], engines: {engines}}}"
    shape = settings(f"rollout={rollout}", f"placement={placement}")
    done = workspace.roll("run", str(workspace.config), *LONG, *shape)
    assert done.returncode == 0, done.stdout
    chain = workspace.chain()
    assert [manifest.iteration for manifest in chain] == list(range(6))
    refuse_gaps(chain)
    assert staleness_of(workspace, chain) == {0, 1}
    return chain


def seconds_of_updates(workspace: Workspace) -> list[tuple[float, float]]:
    """When each began and ended."""
    events = [e for e in read_stages(workspace.folder / "roll-data/work/tiny-1") if e.stage == "update"]
    begins = [event.at.timestamp() for event in events if event.edge is Edge.BEGIN]
    ends = [event.at.timestamp() for event in events if event.edge is Edge.END]
    return list(zip(begins, ends, strict=True))


def worked_during_updates(workspace: Workspace, chain: list[Manifest]) -> set[str]:
    """Engines that generated while the trainer learned."""
    updates = seconds_of_updates(workspace)

    def overlaps(span: Span) -> bool:
        return any(span.begin < end and begin < span.end for begin, end in updates)

    traces = (attempt for manifest in chain[1:] for attempt in read_trace(workspace, manifest))
    return {span.engine for attempt in traces for span in attempt.spans if overlaps(span)}


def worked_after_the_first_update(workspace: Workspace, chain: list[Manifest]) -> set[str]:
    _, end = seconds_of_updates(workspace)[0]
    traces = (attempt for manifest in chain[1:] for attempt in read_trace(workspace, manifest))
    return {span.engine for attempt in traces for span in attempt.spans if span.begin > end}


def count(workspace: Workspace, chain: list[Manifest], is_so: Callable[[AttemptTrace, Trajectory], bool]) -> int:
    """Attempts of which something is so."""
    return sum(
        is_so(attempt, trajectories_of(workspace, manifest)[attempt.problem, attempt.attempt])
        for manifest in chain[1:]
        for attempt in read_trace(workspace, manifest)
    )


def was_resumed(attempt: AttemptTrace, trajectory: Trajectory) -> bool:
    """It has tokens of several visits, and is as long as if there had been one."""
    assert trajectory.num_completion_tokens == attempt.num_tokens == 200
    return sum(span.num_tokens > 0 for span in attempt.spans) > 1


def went_on(attempt: AttemptTrace, trajectory: Trajectory) -> bool:
    """It has tokens of several versions from one visit."""
    return len(attempt.spans) == 1 and len(set(versions_of(trajectory))) > 1


def test_engines_on_the_trainers_device_make_room_and_resume_what_they_had(workspace):
    chain = run_of_long_attempts(workspace, "[0]", "resume")
    assert worked_during_updates(workspace, chain) == set()
    assert count(workspace, chain, was_resumed) > 0


@pytest.mark.parametrize(("in_flight", "is_so"), [("resume", was_resumed), ("continue", went_on)])
def test_of_two_engines_the_one_on_the_trainers_device_makes_room_and_the_other_goes_on(workspace, in_flight, is_so):
    chain = run_of_long_attempts(workspace, "[0, 1]", in_flight)
    assert worked_during_updates(workspace, chain) == {"engine 1"}
    assert worked_after_the_first_update(workspace, chain) == {"engine 0", "engine 1"}
    assert count(workspace, chain, is_so) > 0
