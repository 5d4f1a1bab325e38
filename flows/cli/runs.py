"""List the runs in a store: the iteration each has reached, its held-out accuracy, and how to resume it."""

import argparse

from flows.cli.options import Commands, add_store
from roll_core.errors import RollError


def add(commands: Commands) -> None:
    """Declare `roll runs`."""
    parser = commands.add_parser("runs", help="list the runs in a store", description=__doc__)
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print one line per run; a run that cannot be read gets a line that says why."""
    from flows.flow_runs import crash_dead_if_served
    from roll_core.config.load import absolute_uri
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.runs import find_run, list_runs, read_chain, read_config
    from roll_core.store.records.stored_config import read_stored_config

    store = ObjectStore(absolute_uri(options.store))
    run_ids = list_runs(store)
    if not run_ids:
        print(f"no runs in {store.uri} yet; start one with: roll run configs/runs/quickstart.yaml")
    work_dirs: set[str] = set()
    for run_id in run_ids:
        try:
            if read_stored_config(store, run_id) is None:
                continue
            config = read_config(find_run(store, run_id))
            total = config.iterations
            work_dirs.add(config.work_dir)
            chain = read_chain(store, run_id)
        except RollError as error:
            print(f"{run_id:<24} unreadable: {error}")
            continue
        accuracy = next((m.evaluated.accuracy for m in reversed(chain) if m.evaluated), None)
        reached = chain[-1].iteration if chain else 0
        state = "finished" if reached == total else f"resumable: roll resume {run_id}"
        shown = "-" if accuracy is None else f"{accuracy:.2f}"
        print(f"{run_id:<24} iteration {reached:>5}/{total:<5} accuracy {shown:<5} {state}")
    crash_dead_if_served(work_dirs)
    return 0
