"""Prefect flow that runs a config unbroken once, then kills processes of further runs of it and compares them."""

from prefect import flow

from tasks.runs import open_run
from tests.chaos.kill_points import draw_kill_points
from tests.chaos.outcomes import Outcome
from tests.chaos.process_kills import run_broken, run_unbroken

ONE_LEG_PER_COMMAND = "legs.max_failures=0"
"""Override by which a broken leg ends the command, so that `roll resume` must continue the run."""


@flow(name="chaos")
def chaos(config: str, overrides: list[str] | None = None, kills: int = 40, per_run: int = 5, seed: int = 0) -> Outcome:
    """Run a config unbroken, then kill processes at `kills` points of further runs, at most `per_run` in each."""
    settings = [*(overrides or []), ONE_LEG_PER_COMMAND]
    unbroken = open_run(config, settings)
    events = run_unbroken(unbroken)
    drawn = draw_kill_points(events, kills, per_run, seed)
    broken = [run_broken(open_run(config, settings), points, unbroken) for points in drawn]
    return Outcome(unbroken=unbroken, broken=tuple(broken))
