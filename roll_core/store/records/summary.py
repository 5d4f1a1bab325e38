"""What a run achieved so far, read from its manifests."""

from roll_core.store.records.runs import read_chain, read_config, store_of
from roll_core.types.manifest import Manifest
from roll_core.types.refs import Record, RunRef


class RunSummary(Record):
    """Example: RunSummary(run_id="quickstart-3", iterations=40, curve=((0, 0.01), (20, 0.88), (40, 0.97)))"""

    run_id: str
    iterations: int
    curve: tuple[tuple[int, float], ...]
    """(iteration, held-out accuracy) of every evaluation."""

    @property
    def sentence(self) -> str:
        return f"held-out accuracy {self.curve[0][1]:.2f} -> {self.curve[-1][1]:.2f} in {self.iterations} iterations"


def summary_of(run_id: str, chain: list[Manifest]) -> RunSummary:
    curve = tuple((m.iteration, m.evaluated.accuracy) for m in chain if m.evaluated is not None)
    return RunSummary(run_id=run_id, iterations=chain[-1].iteration if chain else 0, curve=curve)


def summary_of_finished(run: RunRef) -> RunSummary | None:
    """What a run achieved, if it came to its last iteration."""
    chain = read_chain(store_of(run), run.run_id)
    is_finished = bool(chain) and chain[-1].iteration == read_config(run).iterations
    return summary_of(run.run_id, chain) if is_finished else None
