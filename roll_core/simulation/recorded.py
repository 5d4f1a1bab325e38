"""What a stored run recorded of its speed, for fitting models to it and for comparing predictions with it."""

from dataclasses import dataclass

from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, read_chain, read_config
from roll_core.store.records.traces import decode_trace
from roll_core.types.trace import AttemptTrace


@dataclass(frozen=True)
class RecordedRun:
    config: RunConfig
    traces: tuple[list[AttemptTrace], ...]
    """By iteration, of those that have one."""
    timings: tuple[dict[str, float], ...]
    """Of the same iterations, as their manifests have them."""
    cold: tuple[bool, ...]
    """Whether it is the first of its leg, and not the only one: caches are cold then, and nothing was generated ahead."""

    @property
    def warm_traces(self) -> list[list[AttemptTrace]]:
        return [traces for traces, cold in zip(self.traces, self.cold, strict=True) if not cold]

    @property
    def warm_timings(self) -> list[dict[str, float]]:
        return [timings for timings, cold in zip(self.timings, self.cold, strict=True) if not cold]

    @property
    def seconds_per_iteration(self) -> float:
        """With the share that every iteration has of an evaluation and a checkpoint, whenever those were."""
        timings = self.warm_timings
        between = sum(t["wall"] - t.get("evaluate", 0.0) - t.get("checkpoint", 0.0) for t in timings) / len(timings)
        shares = (("evaluate", self.config.evaluation.every), ("checkpoint", self.config.checkpoint.every))
        return between + sum(_mean_of(stage, timings) / every for stage, every in shares)


def _mean_of(stage: str, timings: list[dict[str, float]]) -> float:
    """Over the iterations that had it."""
    seconds = [timing[stage] for timing in timings if stage in timing]
    return sum(seconds) / max(1, len(seconds))


def read_recorded(store: ObjectStore, run_id: str) -> RecordedRun:
    """All iterations of a run that have a trace."""
    config = read_config(find_run(store, run_id, "--trace"))
    traced = [m for m in read_chain(store, run_id) if m.collected is not None]
    if not traced:
        raise UserError(f"--trace: {run_id} has no trace of an iteration in {store.uri}: name a run that does")
    first_of_leg = {m.leg: m.iteration for m in reversed(traced)}
    cold = [m.iteration == first_of_leg[m.leg] for m in traced]
    artifacts = [m.collected.trace for m in traced if m.collected is not None]
    return RecordedRun(
        config,
        tuple(decode_trace(store.get(artifact)) for artifact in artifacts),
        tuple(m.timings for m in traced),
        tuple(cold) if not all(cold) else (False,) * len(cold),
    )
