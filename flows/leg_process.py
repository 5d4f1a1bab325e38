"""Entry point of a leg in its driver's process. The outer flow and `roll leg` pass it to a launcher.

Importing Prefect takes seconds, and so does starting a Prefect server. Both happen at the same time: this file imports
Prefect only after the leg's private server, if it needs one, was started.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.prefect_server import private_server
from roll_core.host import make_private_folder
from roll_core.reporting.stage_log import StageLog
from roll_core.store.records.runs import read_config
from roll_core.types.leg import LegAllocation, LegEnded
from roll_core.types.refs import RunRef


def run_train_leg(run: RunRef, leg: int, context: dict[str, Any] | None, allocation: LegAllocation) -> LegEnded:
    """Run the train_leg flow as a child of the flow that launched it.

    `context` is the Prefect context of that flow. If it is None, the leg cannot reach that flow's server and
    starts a private one.
    """
    if context is None:
        with _private_server(run, leg, allocation) as wait_for_server:
            from flows.train_leg import run_leg_flow

            wait_for_server()
            return run_leg_flow(run, leg, allocation)

    from prefect.context import hydrated_context

    from flows.train_leg import run_leg_flow

    with hydrated_context(context):
        return run_leg_flow(run, leg, allocation)


@contextlib.contextmanager
def _private_server(run: RunRef, leg: int, allocation: LegAllocation) -> Iterator[Callable[[], None]]:
    """Start the leg's private Prefect server. Yield a function that waits until the server is up."""
    assert allocation.scratch is not None, "a leg on this machine reaches the server of whoever launched it"
    work_dir = Path(read_config(run).work_dir)
    leg_dir, template = work_dir / run.run_id / f"leg-{leg}", work_dir / f"prefect-{version('prefect')}.db"
    make_private_folder(leg_dir.parent)
    leg_dir.mkdir(exist_ok=True)
    with private_server(leg_dir, allocation.scratch, template) as wait_for_server:

        def wait() -> None:
            with StageLog(leg_dir).stage("prefect"):
                wait_for_server()

        yield wait
