"""Pages of evaluated iterations, made in a thread beside training: goodput, sample trajectories, timeline.

Used by `tasks/tracking.py`. A commit never waits for a page. The end of a leg waits for the rest, for a bounded time.
"""

import json
import logging
import queue
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from roll_core.reporting.goodput import commits_in_logs, events_until, goodput_metrics, leg_histories
from roll_core.reporting.stage_log import read_stages, read_stages_by_leg
from roll_core.reporting.timeline import timeline_html
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import decode_trajectories
from roll_core.store.records.runs import read_manifest
from roll_core.store.records.traces import decode_trace
from roll_core.tracking.tracker import Tracker
from roll_core.types.manifest import Evaluated, Manifest, Metrics

log = logging.getLogger(__name__)

TIMELINE_ITERATIONS = 6
"""Number of iterations in a timeline: enough to show how they overlap, few enough to read at a glance."""


class BackgroundTracking:
    """Thread that runs tracking jobs one after another. Errors of a job are logged and cost that job only."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after those submitted before. It is dropped if it has not begun when `close` returns."""
        self._jobs.put(job)
        if self._thread is None:
            # A daemon: a page that takes long must not hold a process that has ended its work.
            self._thread = threading.Thread(target=self._work, name="background-tracking", daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Wait for all jobs, `seconds` at most. Jobs that have not begun by then are dropped."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive() and not self._is_closed.is_set():
                log.warning("tracking drops %d page(s) that were not made within %.0f s", self._jobs.qsize(), seconds)
        self._is_closed.set()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed.is_set():
            with self._tracker.dropping_errors():
                job()


class Pages:
    """Maker of the pages of a run's evaluated iterations, from manifests, stage logs and stored rollouts."""

    def __init__(self, store: ObjectStore, run_dir: Path, num_samples: int, tracker: Tracker):
        """Make pages from a store and from the stage logs in `run_dir`, with `num_samples` trajectories per evaluation."""
        self._store = store
        self._run_dir = run_dir
        self._num_samples = num_samples
        self._tracker = tracker

    def log(self, manifest: Manifest) -> None:
        """Send the pages of an evaluated iteration to the tracker. One that cannot be made costs none of the others."""
        assert manifest.evaluated is not None, "only evaluated iterations have pages"
        with self._tracker.dropping_errors():
            at = datetime.fromisoformat(manifest.committed_at)
            self._tracker.log_metrics(manifest.iteration, goodput_at(manifest, self._run_dir), at)
        with self._tracker.dropping_errors():
            sample = readable_sample(manifest.evaluated, self._store, self._num_samples)
            self._tracker.log_artifact(f"trajectories/{manifest.iteration:08d}.jsonl", sample)
        if manifest.collected:
            with self._tracker.dropping_errors():
                page = draw_timeline(manifest, self._store, self._run_dir)
                self._tracker.log_artifact(f"timeline/{manifest.iteration:08d}.html", page)


def goodput_at(manifest: Manifest, run_dir: Path) -> Metrics:
    """Goodput of all legs up to the commit of an iteration, from the stage logs on this machine."""
    events = events_until(read_stages_by_leg(run_dir), datetime.fromisoformat(manifest.committed_at))
    committed_by = commits_in_logs(events) | {manifest.iteration: manifest.leg}  # its commit had not ended then
    return goodput_metrics(leg_histories(events, committed_by))


def readable_sample(evaluated: Evaluated, store: ObjectStore, count: int) -> bytes:
    """First trajectories of an evaluation as JSON lines: the model's answer and its grade."""
    rows = [
        {
            "problem": t.problem_id,
            "answer": t.turns[-1].text,
            "reward": t.score.value if t.score else None,
            "correct": t.score.correct if t.score else None,
            "ending": t.ending,
        }
        for t in decode_trajectories(store.get(evaluated.trajectories))[:count]
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def draw_timeline(last: Manifest, store: ObjectStore, run_dir: Path) -> bytes:
    """Draw the timeline of the iterations up to `last` as an HTML page, from the stage logs on this machine."""
    shown = recent_iterations(last, store)
    numbers = {manifest.iteration for manifest in shown}
    stages = [event for event in read_stages(run_dir) if event.iteration in numbers]
    traces = [
        attempt for manifest in shown if manifest.collected for attempt in decode_trace(store.get(manifest.collected.trace))
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
