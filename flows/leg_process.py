"""What a leg's process runs. Prefect takes seconds to import and a server of it seconds to start, so both happen at once:
nothing here imports Prefect before the leg's own server, where it needs one, is on its way.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.prefect_server import own_api
from roll_core.reporting.stage_log import StageLog
from roll_core.store.records.runs import read_config
from roll_core.types.leg import LegAllocation, LegEnded
from roll_core.types.refs import RunRef


def run_train_leg(run: RunRef, leg: int, context: dict[str, Any] | None, place: LegAllocation) -> LegEnded:
    """The flow, as a child of the flow that launched it, or by a Prefect server of its own where that one is not reached."""
    if context is None:
        with _own_server(run, leg, place) as wait_for_server:
            from flows.train_leg import answer_of_leg

            wait_for_server()
            return answer_of_leg(run, leg, place)

    from prefect.context import hydrated_context

    from flows.train_leg import answer_of_leg

    with hydrated_context(context):
        return answer_of_leg(run, leg, place)


@contextlib.contextmanager
def _own_server(run: RunRef, leg: int, place: LegAllocation) -> Iterator[Callable[[], None]]:
    assert place.scratch is not None, "a leg on this machine reaches the server of whoever launched it"
    work_dir = Path(read_config(run).work_dir)
    leg_dir, template = work_dir / run.run_id / f"leg-{leg}", work_dir / f"prefect-{version('prefect')}.db"
    leg_dir.mkdir(parents=True, exist_ok=True)
    with own_api(leg_dir, place.scratch, template) as wait_for_server:

        def wait() -> None:
            with StageLog(leg_dir).stage("prefect"):
                wait_for_server()

        yield wait
