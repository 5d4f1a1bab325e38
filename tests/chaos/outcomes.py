"""Outcomes of broken runs, and the functions that compare a broken run with an unbroken one.

Pure functions over manifests and stage events. Integration tests use `differences` for runs of their own.
"""

from collections.abc import Sequence
from datetime import datetime
from itertools import zip_longest

from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.types.manifest import Manifest
from roll_core.types.refs import Record, RunRef
from tests.chaos.kill_points import KillPoint

TIME_METRICS = (
    *("throughput/", "engine/", "grader/", "rollout/queue_", "rollout/buffer_"),
    *("rollout/interruptions", "rollout/engines"),  # deaths, and attempts that moved to another engine
)
"""Prefixes of metrics that measure time or load instead of results. They differ between equal runs."""


class Recovery(Record):
    """One kill, or one fault of a service, and what became of the run.

    Example: Recovery(point=KillPoint(...), last_event="update 3 begin", num_committed=3, num_lost=0, survived=False,
    seconds=11.4, error_line="trainer rank 0 died during update", differences=())
    """

    point: KillPoint
    last_event: str
    """Last line of the stage log before the fault."""
    num_committed: int
    """Number of iterations, iteration 0 included, in the store when the command had ended or had recovered."""
    num_lost: int
    """Number of these iterations that were missing or changed at the end of the run. Must be zero."""
    survived: bool
    """True if the command continued by itself; False if it ended and the run was resumed."""
    seconds: float | None
    """Seconds from the fault to the commit of an iteration that began after it; None if no such iteration followed."""
    error_line: str
    """Last line the command printed; empty if the command was killed itself, or did not fail."""
    differences: tuple[str, ...]
    """Differences from the unbroken run between this fault and the next, and defects of how the command ended."""

    @property
    def verdict(self) -> str:
        """Cell of the matrix. Example: ok 11 s"""
        if self.num_lost:
            return f"lost {self.num_lost}"
        if self.differences:
            return f"{len(self.differences)} differ"
        word = "survived" if self.survived else "ok"
        return word if self.seconds is None else f"{word} {self.seconds:.0f} s"


class BrokenRun(Record):
    """A finished run that was broken at some points and resumed where it did not survive."""

    run_id: str
    recoveries: tuple[Recovery, ...]
    missed: tuple[KillPoint, ...]
    """Kill points whose stage never began."""
    generated_again: tuple[str, ...]
    """Collects of iterations that had been committed before. Must be empty."""
    num_collects: int
    """Number of collects that began, including those a kill undid."""


class Outcome(Record):
    """An unbroken run, and the broken runs that must equal it."""

    unbroken: RunRef
    broken: tuple[BrokenRun, ...]


def differences(unbroken: Sequence[Manifest], broken: Sequence[Manifest]) -> tuple[str, ...]:
    """Sentences about everything that is not equal to the bit in two chains of manifests; empty if all is equal.

    Compares weights, rollouts (token ids, logprobs, scores), the draws of problems, and every metric except times.
    """
    found = []
    for expected, got in zip_longest(unbroken, broken):
        if expected is None or got is None:
            found.append(f"iteration {(expected or got).iteration} is in one run only")
            continue
        ours, theirs = _quantities(got), _quantities(expected)
        found += [
            f"iteration {expected.iteration}: {name} is {ours.get(name)}, unbroken {theirs.get(name)}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
    return tuple(found)


def _quantities(manifest: Manifest) -> dict[str, str]:
    """Compared quantities by name, as text: NaN equals NaN, and two floats are equal only if all their bits are."""
    collected, evaluated = manifest.collected, manifest.evaluated
    return {
        "weights digest": manifest.weights_digest,
        "trajectories digest": collected.trajectories.digest if collected else "",
        "number of trajectories": str(collected.num_trajectories if collected else 0),
        "evaluation digest": evaluated.trajectories.digest if evaluated else "",
        "problems drawn": manifest.draws.model_dump_json() if manifest.draws else "",
        "controllers": repr(manifest.controllers),
    } | {name: repr(value) for name, value in manifest.metrics.items() if not _measures_time(name)}


def _measures_time(name: str) -> bool:
    return name.startswith(TIME_METRICS) or "seconds" in name


def generated_again(chain: Sequence[Manifest], events: Sequence[StageEvent]) -> tuple[str, ...]:
    """Names of collects that began after their iteration had been committed."""
    committed_at = {manifest.iteration: datetime.fromisoformat(manifest.committed_at) for manifest in chain}
    collects = [event for event in events if event.stage == "collect" and event.edge is Edge.BEGIN]
    return tuple(e.name for e in collects if e.iteration in committed_at and e.at > committed_at[e.iteration])


def committed_after(events: Sequence[StageEvent], at: datetime) -> datetime | None:
    """Time of the first commit of an iteration that began after a fault; None if there is none.

    Every process takes part in a whole iteration, so such a commit proves that the dead one was replaced.
    """
    begun = {event.iteration for event in events if event.stage == "collect" and event.edge is Edge.BEGIN and event.at > at}
    commits = (event for event in events if event.stage == "commit" and event.edge is Edge.END and event.iteration in begun)
    return next((event.at for event in commits), None)
