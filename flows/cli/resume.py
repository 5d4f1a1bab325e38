"""Resume a run that was stopped, killed or lost, from its last committed iteration."""

import argparse
from typing import TYPE_CHECKING

from flows.cli.follow import follow
from flows.cli.options import Commands, add_store

if TYPE_CHECKING:
    from roll_core.store.records.runs import RunSummary


def add(commands: Commands) -> None:
    """Declare `roll resume`."""
    parser = commands.add_parser("resume", help="carry on a run that was stopped, killed or lost", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="for example quickstart-1; `roll runs` lists them")
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Check the stored config against this machine, then run the flow `rlvr_resume`."""
    from roll_core.config.load import absolute_uri
    from roll_core.planning.preflight import check_ready
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.runs import find_run, read_config

    store_uri = absolute_uri(options.store)
    config = read_config(find_run(ObjectStore(store_uri), options.run))
    check_ready(config)

    def start_flow() -> "RunSummary":
        from flows.rlvr import rlvr_resume

        return rlvr_resume(run_id=options.run, store=store_uri)

    return follow(config, store_uri, start_flow)
