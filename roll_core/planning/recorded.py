"""What a stored run recorded of its speed, for fitting models to it and for comparing predictions with it."""

from dataclasses import dataclass

from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.store.object_store import ObjectStore
from roll_core.store.runs import find_run, read_chain, read_config
from roll_core.store.traces import decode_trace
from roll_core.types.trace import AttemptTrace


@dataclass(frozen=True)
class RecordedRun:
    config: RunConfig
    traces: tuple[list[AttemptTrace], ...]
    """By iteration, of those that have one."""
    timings: tuple[dict[str, float], ...]
    """Of the same iterations, as their manifests have them."""

    @property
    def seconds_per_iteration(self) -> float:
        return sum(timing["wall"] for timing in self.timings) / len(self.timings)


def read_recorded(store: ObjectStore, run_id: str) -> RecordedRun:
    """Of a run, without the first iteration of each leg if there are others: caches are cold then."""
    config = read_config(find_run(store, run_id, "--trace"))
    traced = [m for m in read_chain(store, run_id) if m.collected is not None and m.collected.trace is not None]
    if not traced:
        raise UserError(f"--trace: {run_id} has no trace of an iteration in {store.uri}: name a run that does")
    first_of_leg = {m.leg: m.iteration for m in reversed(traced)}
    warm = [m for m in traced if m.iteration != first_of_leg[m.leg]] or traced
    artifacts = [m.collected.trace for m in warm if m.collected is not None and m.collected.trace is not None]
    return RecordedRun(
        config,
        tuple(decode_trace(store.get(artifact)) for artifact in artifacts),
        tuple(m.timings for m in warm),
    )
