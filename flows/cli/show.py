"""Show one run: its iterations, the runs it was forked from, where the time of its legs went, and where its files are."""

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.follow import print_where_to_look
from flows.cli.options import Commands, add_store

if TYPE_CHECKING:
    from rich.console import Console

    from roll_core.types.refs import RunRef


def add(commands: Commands) -> None:
    """Declare `roll show`."""
    parser = commands.add_parser(
        "show", help="show one run: its curve, its iterations, where things are", description=__doc__
    )
    parser.add_argument("run", metavar="RUN", help="for example quickstart-1; `roll runs` lists them")
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print a run's iterations, legs and their causes of ending, from manifests in the store and stage logs of legs."""
    from rich.console import Console

    from flows.cli.progress_view import HEADER, iteration_row
    from flows.flow_runs import crash_dead_if_served
    from roll_core.config.exactness import describe_exactness
    from roll_core.config.load import absolute_uri
    from roll_core.config.operations.legs import SlurmLauncherConfig
    from roll_core.data.ledger import totals
    from roll_core.reporting.goodput import commits_in_chain, engines_over_time, leg_histories, leg_measurements, leg_rows
    from roll_core.reporting.stage_log import read_stages_by_leg
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.forks import lineage
    from roll_core.store.records.runs import find_run, read_chain, read_config, summary_of

    store = ObjectStore(absolute_uri(options.store))
    run_ref = find_run(store, options.run)
    chain, config = read_chain(store, run_ref.run_id), read_config(run_ref)
    ancestors = lineage(store, config)
    console = Console()
    accuracy = None
    console.print(HEADER, style="dim", highlight=False)
    for manifest in chain:
        accuracy = manifest.evaluated.accuracy if manifest.evaluated else accuracy
        console.print(iteration_row(manifest, accuracy), highlight=False, soft_wrap=True)
    for ancestor in ancestors:
        console.print(f"forked   {ancestor.run_id}@{ancestor.iteration}: {', '.join(ancestor.changes)}", highlight=False)
    events = read_stages_by_leg(Path(config.work_dir) / run_ref.run_id)
    histories = leg_histories(events, commits_in_chain(chain))
    for row in [*leg_rows(histories), *leg_measurements(events)] if histories else ():
        console.print(row, highlight=False, soft_wrap=True)
    console.print(f"exact    {describe_exactness(config)}", highlight=False, soft_wrap=True)
    if config.legs.elastic is not None:
        console.print(f"engines  {engines_over_time(chain)}", highlight=False, soft_wrap=True)
    if drawn := totals(chain):
        console.print(f"problems {drawn}", highlight=False)
    if isinstance(config.legs.launcher, SlurmLauncherConfig) and shutil.which("squeue"):
        _print_queue(console, run_ref)
    print_where_to_look(console, run_ref, config, summary_of(run_ref.run_id, chain))
    crash_dead_if_served({config.work_dir})
    return 0


def _print_queue(console: "Console", run_ref: "RunRef") -> None:
    """Print one line per SLURM job of a run that is pending or running."""
    from tasks.legs import describe_jobs

    for job in describe_jobs(run_ref):
        console.print(f"queue    {job}", highlight=False)
