"""Recorded speed of a stored run: traces and timings, to fit models to and to compare predictions with."""

from dataclasses import dataclass

from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, read_chain, read_config
from roll_core.store.records.traces import decode_trace
from roll_core.types.trace import AttemptTrace


@dataclass(frozen=True)
class RecordedRun:
    """Config, traces and timings of the traced iterations of a run."""

    config: RunConfig
    traces: tuple[list[AttemptTrace], ...]
    """Attempts of each traced iteration."""
    timings: tuple[dict[str, float], ...]
    """Seconds by stage of each traced iteration, from its manifest."""
    cold: tuple[bool, ...]
    """True for the first traced iteration of a leg: its caches are cold and nothing was generated ahead. All False if no
    iteration would be left."""

    @property
    def warm_traces(self) -> list[list[AttemptTrace]]:
        """Traces without cold iterations."""
        return [traces for traces, cold in zip(self.traces, self.cold, strict=True) if not cold]

    @property
    def warm_timings(self) -> list[dict[str, float]]:
        """Timings without cold iterations."""
        return [timings for timings, cold in zip(self.timings, self.cold, strict=True) if not cold]

    @property
    def seconds_per_iteration(self) -> float:
        """Mean seconds of a warm iteration. Evaluations and checkpoints count with their mean seconds divided by their
        interval, so that it does not matter which iterations had them."""
        timings = self.warm_timings
        between = sum(t["wall"] - t.get("evaluate", 0.0) - t.get("checkpoint", 0.0) for t in timings) / len(timings)
        shares = (("evaluate", self.config.evaluation.every), ("checkpoint", self.config.checkpoint.every))
        return between + sum(_mean_of(stage, timings) / every for stage, every in shares)


def _mean_of(stage: str, timings: list[dict[str, float]]) -> float:
    """Mean seconds over the iterations that had the stage."""
    seconds = [timing[stage] for timing in timings if stage in timing]
    return sum(seconds) / max(1, len(seconds))


def read_recorded(store: ObjectStore, run_id: str) -> RecordedRun:
    """Read all iterations of a run that have a trace; UserError if there is none."""
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
