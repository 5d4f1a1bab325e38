"""Resume a run that was stopped, killed or lost, from its last committed iteration."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.follow import follow
from flows.cli.options import Commands, add_store

if TYPE_CHECKING:
    from roll_core.config.run import RunConfig
    from roll_core.store.records.runs import RunSummary
    from roll_core.types.refs import RunRef


def add(commands: Commands) -> None:
    """Declare `roll resume`."""
    parser = commands.add_parser("resume", help="carry on a run that was stopped, killed or lost", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="for example quickstart-1; `roll runs` lists them")
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Check the stored config against this machine, then run the flow `rlvr_resume`. Start nothing for a finished run."""
    from roll_core.config.load import absolute_uri
    from roll_core.planning.preflight import check_ready
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.exports import is_finished
    from roll_core.store.records.runs import find_run, read_config

    store_uri = absolute_uri(options.store)
    run_ref = find_run(ObjectStore(store_uri), options.run)
    config = read_config(run_ref)
    if is_finished(run_ref):
        return _report_finished(run_ref, config)
    check_ready(config)

    def start_flow() -> "RunSummary":
        from flows.rlvr import rlvr_resume

        return rlvr_resume(run_id=options.run, store=store_uri)

    return follow(config, store_uri, start_flow)


def _report_finished(run_ref: "RunRef", config: "RunConfig") -> int:
    """Print that a run is finished, and how to upload what MLflow has not got; cancel elastic jobs that outlived the run."""
    from roll_core.tracking.spool import Spool

    print(f"{run_ref.run_id} is finished: {config.iterations} iterations")
    spool = Spool(Path(config.work_dir) / run_ref.run_id / "tracking")
    if config.tracking.uri is not None and (left := spool.count_left()):
        print(f"{left} events wait for MLflow: python -m roll_core.tracking.uploader {spool.folder} --once")
    if config.legs.elastic is not None:
        from tasks.legs import cancelling_elastic_jobs

        with cancelling_elastic_jobs(run_ref):
            pass
    return 0
