"""timeline: where the time of the last iterations went, as a page."""

from roll_core.reporting.stage_log import read_stages
from roll_core.reporting.timeline import timeline_html
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import read_manifest
from roll_core.store.records.traces import decode_trace
from roll_core.types.manifest import Manifest
from tasks.services import Services, run_dir

SHOWN = 6
"""Iterations on a page: enough to see how they overlap, few enough to see it at a glance."""


def draw_timeline(last: Manifest, services: Services) -> bytes:
    """Of the iterations up to one, as far as this machine knows when their stages were."""
    shown = recent_iterations(last, services.store)
    numbers = {manifest.iteration for manifest in shown}
    events = read_stages(run_dir(services.run, services.config))
    stages = [event for event in events if event.iteration in numbers]
    traces = [
        attempt
        for manifest in shown
        if manifest.collected and manifest.collected.trace
        for attempt in decode_trace(services.store.get(manifest.collected.trace))
    ]
    title = f"{last.run_id}, iterations {min(numbers)} to {max(numbers)}"
    return timeline_html(stages, traces, title).encode()


def recent_iterations(last: Manifest, store: ObjectStore) -> list[Manifest]:
    """The last few of a run, of those that collected anything."""
    numbers = range(max(1, last.iteration - SHOWN + 1), last.iteration)
    earlier = (read_manifest(store, last.run_id, number) for number in numbers)
    return [*(manifest for manifest in earlier if manifest is not None), last]  # a fork has none from before it began
