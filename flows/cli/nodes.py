"""List the nodes that failed under any run of a store, and which of them later legs exclude; or forget their failures."""

import argparse

from flows.cli.options import Commands, add_store
from roll_core.errors import UserError


def add(commands: Commands) -> None:
    """Declare `roll nodes`."""
    parser = commands.add_parser(
        "nodes", help="nodes that failed, and which of them later legs leave out", description=__doc__
    )
    parser.add_argument("--clear", nargs="+", default=[], metavar="NODE", help="forget the failures of these")
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print the failures by node, or remove those of the nodes that --clear names."""
    from datetime import UTC, datetime

    from roll_core.config.load import absolute_uri
    from roll_core.config.operations.legs import NodesConfig
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.nodes import clear_failures, excluded_nodes, read_failures

    store = ObjectStore(absolute_uri(options.store))
    known = read_failures(store)
    if options.clear:
        if unknown := sorted(set(options.clear) - known.keys()):
            raise UserError(f"--clear: nothing is known of {', '.join(unknown)}; known nodes: {', '.join(known) or 'none'}")
        print(f"{clear_failures(store, options.clear)} failures of {', '.join(options.clear)}: forgotten")
        return 0
    if not known:
        print(f"no failures of nodes in {store.uri}")
    policy = NodesConfig()
    excluded = excluded_nodes(store, policy, datetime.now(UTC))
    for node, failures in known.items():
        left_out = f"left out ({policy.failures} or more in {policy.window_hours:g} hours)" if node in excluded else "in use"
        print(f"{node:<24} {len(failures)} failures, {left_out}")
        for failure in failures:
            print(f"  {failure.at:%Y-%m-%d %H:%M}  {failure.run_id} leg {failure.leg}: {failure.reason}")
    return 0
