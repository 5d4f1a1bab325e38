"""Repeat the update of a committed iteration from its stored rollouts and compare the result with what was committed.

Exits with 0 if loss, gradient norm and weights are equal to the bit, with 1 if they differ.
"""

import argparse
from pathlib import Path

from flows.cli.options import Commands, add_store, parse_run_and_iteration

DIFFERENT = 1
"""Exit code if the replayed update differs from the committed one."""


def add(commands: Commands) -> None:
    """Declare `roll replay`."""
    parser = commands.add_parser(
        "replay", help="make the update of a committed iteration again and compare; 0: equal", description=__doc__
    )
    parser.add_argument("iteration", metavar="RUN@ITERATION", help="for example quickstart-1@12")
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Compute the update of a committed iteration again, print whether each quantity equals the committed one, and return
    DIFFERENT if one does not."""
    from flows.prefect_server import prefect_api
    from roll_core.config.load import absolute_uri
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.runs import check_has_update, find_run, read_chain, read_config

    run_id, iteration = parse_run_and_iteration(options.iteration)
    store_uri = absolute_uri(options.store)
    store = ObjectStore(store_uri)
    config = read_config(find_run(store, run_id))
    check_has_update(read_chain(store, run_id), run_id, iteration)
    with prefect_api(Path(config.work_dir)):
        from flows.replay import replay

        replayed = replay(run_id, iteration, store_uri)
    for quantity in replayed.compared:
        different = next((d for d in replayed.differences if d.quantity == quantity), None)
        found = f"committed {different.committed}, replayed {different.replayed}" if different else "equal"
        print(f"{quantity:<22} {found}")
    return DIFFERENT if replayed.differences else 0
