"""Start a run of a config and follow it to its last iteration. Ctrl-C leaves the run resumable and says how."""

import argparse
from typing import TYPE_CHECKING

from flows.cli.follow import follow
from flows.cli.options import Commands, add_config

if TYPE_CHECKING:
    from roll_core.store.records.runs import RunSummary


def add(commands: Commands) -> None:
    """Declare `roll run`."""
    parser = commands.add_parser("run", help="start a run of a config and follow it to the end", description=__doc__)
    add_config(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Check the config and the machine, then run the flow `rlvr`."""
    from roll_core.config.load import load_config
    from roll_core.planning.preflight import check_ready
    from tasks.leg_requests import check_submission

    config = load_config(options.config, options.overrides)
    check_ready(config)
    check_submission(config)

    def start_flow() -> "RunSummary":
        from flows.rlvr import rlvr

        return rlvr(config=options.config, overrides=options.overrides)

    return follow(config, config.store.uri, start_flow)
