"""Tracking of committed iterations: sends metrics, manifests, sample trajectories and timelines to the tracker.

Used by `commit`, and at the start of a leg for iterations that an earlier leg did not track.
"""

import contextlib
import json
from datetime import datetime

from roll_core.errors import ArtifactDamaged
from roll_core.reporting.goodput import commits_in_logs, goodput_metrics, leg_histories
from roll_core.reporting.stage_log import read_stages, read_stages_by_leg
from roll_core.reporting.timeline import timeline_html
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import decode_trajectories
from roll_core.store.records.runs import read_manifest
from roll_core.store.records.traces import decode_trace
from roll_core.types.manifest import Evaluated, Manifest
from tasks.services import Services, run_dir

TIMELINE_ITERATIONS = 6
"""Number of iterations in a timeline: enough to show how they overlap, few enough to read at a glance."""


def track_missed(chain: list[Manifest], services: Services) -> None:
    """Track the iterations that earlier legs may have committed without tracking them.

    That is the last iteration, or all of the run's iterations if the spool was lost.
    """
    ours = [manifest for manifest in chain if manifest.run_id == services.run.run_id]
    for manifest in ours if services.tracker.is_fresh else ours[-1:]:
        track(manifest, services)


def track(manifest: Manifest, services: Services) -> None:
    """Send a committed iteration to the tracker. Idempotent, and a failure has no effect on the commit."""
    tracker = services.tracker
    timings = {f"seconds/{stage}": seconds for stage, seconds in manifest.timings.items()}
    tracker.log_metrics(manifest.iteration, manifest.metrics | timings, datetime.fromisoformat(manifest.committed_at))
    tracker.log_artifact(f"manifests/{manifest.iteration:08d}.json", manifest.model_dump_json(indent=1).encode())
    if manifest.evaluated:
        track_goodput(manifest, services)
        # Trajectories that cannot be read for the tracker must not end a run.
        with contextlib.suppress(OSError, ArtifactDamaged):
            sample = _readable_sample(manifest.evaluated, services)
            tracker.log_artifact(f"trajectories/{manifest.iteration:08d}.jsonl", sample)
            if manifest.collected:
                tracker.log_artifact(f"timeline/{manifest.iteration:08d}.html", draw_timeline(manifest, services))


def track_goodput(manifest: Manifest, services: Services) -> None:
    """Track how the time of all legs so far was spent, from the stage logs on this machine."""
    with contextlib.suppress(OSError, ValueError):
        events = read_stages_by_leg(run_dir(services.run, services.config))
        committed_by = commits_in_logs(events) | {manifest.iteration: manifest.leg}  # this commit is still in progress
        metrics = goodput_metrics(leg_histories(events, committed_by))
        services.tracker.log_metrics(manifest.iteration, metrics, datetime.fromisoformat(manifest.committed_at))


def _readable_sample(evaluated: Evaluated, services: Services) -> bytes:
    """First trajectories of an evaluation as JSON lines: the model's answer and its grade."""
    trajectories = decode_trajectories(services.store.get(evaluated.trajectories))
    rows = [
        {
            "problem": t.problem_id,
            "answer": t.turns[-1].text,
            "reward": t.score.value if t.score else None,
            "correct": t.score.correct if t.score else None,
            "ending": t.ending,
        }
        for t in trajectories[: services.config.tracking.trajectory_samples]
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def draw_timeline(last: Manifest, services: Services) -> bytes:
    """Draw the timeline of the iterations up to `last` as an HTML page, from the stage logs on this machine."""
    shown = recent_iterations(last, services.store)
    numbers = {manifest.iteration for manifest in shown}
    events = read_stages(run_dir(services.run, services.config))
    stages = [event for event in events if event.iteration in numbers]
    traces = [
        attempt
        for manifest in shown
        if manifest.collected
        for attempt in decode_trace(services.store.get(manifest.collected.trace))
    ]
    title = f"{last.run_id}, iterations {min(numbers)} to {max(numbers)}"
    return timeline_html(stages, traces, title).encode()


def recent_iterations(last: Manifest, store: ObjectStore) -> list[Manifest]:
    """Manifests of the last TIMELINE_ITERATIONS iterations up to `last`, without iteration 0, which collects nothing."""
    numbers = range(max(1, last.iteration - TIMELINE_ITERATIONS + 1), last.iteration)
    earlier = (read_manifest(store, last.run_id, number) for number in numbers)
    return [
        *(manifest for manifest in earlier if manifest is not None),
        last,
    ]  # a fork has no manifests before its first iteration
