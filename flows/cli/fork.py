"""Start a new run from a committed iteration of another run, with some config keys changed. Stored artifacts are shared."""

import argparse
from typing import TYPE_CHECKING

from flows.cli.follow import follow
from flows.cli.options import Commands, add_overrides, add_store, parse_run_and_iteration

if TYPE_CHECKING:
    from roll_core.store.records.runs import RunSummary


def add(commands: Commands) -> None:
    """Declare `roll fork`."""
    parser = commands.add_parser(
        "fork", help="a new run that goes on from another's iteration with another config", description=__doc__
    )
    parser.add_argument("origin", metavar="RUN@ITERATION", help="for example quickstart-1@20")
    add_overrides(parser)
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Check the config of the fork, then run the flow `rlvr_fork`."""
    from roll_core.config.load import absolute_uri
    from roll_core.planning.preflight import check_ready
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.forks import forked_config

    run_id, iteration = parse_run_and_iteration(options.origin)
    store_uri = absolute_uri(options.store)
    config = forked_config(ObjectStore(store_uri), run_id, iteration, options.overrides)
    check_ready(config)

    def start_flow() -> "RunSummary":
        from flows.rlvr import rlvr_fork

        return rlvr_fork(run_id=run_id, iteration=iteration, store=store_uri, overrides=options.overrides)

    return follow(config, store_uri, start_flow)
