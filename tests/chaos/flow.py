"""Runs broken on purpose: is what comes out of them, after every resume, what an unbroken run gives, to the bit?"""

from prefect import flow

from tasks.runs import open_run
from tests.chaos.breaking import run_broken, run_unbroken
from tests.chaos.kill_points import Outcome, draw_kill_points

ONE_LEG_A_COMMAND = "legs.max_failures=0"
"""A broken leg ends the command, so that it is `roll resume` that carries the run on."""


@flow(name="chaos")
def chaos(config: str, overrides: list[str] | None = None, kills: int = 40, per_run: int = 5, seed: int = 0) -> Outcome:
    """An unbroken run of a config, then as many broken ones as `kills` need, `per_run` each."""
    settings = [*(overrides or []), ONE_LEG_A_COMMAND]
    unbroken = open_run(config, settings)
    events = run_unbroken(unbroken)
    drawn = draw_kill_points(events, kills, per_run, seed)
    broken = [run_broken(open_run(config, settings), points, unbroken) for points in drawn]
    return Outcome(unbroken=unbroken, broken=tuple(broken))
