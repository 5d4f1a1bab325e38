"""Train the reference runs and compare each with the accepted runs before it. Exits with 0 if none is worse.

With --accept nothing is trained: a rejected run becomes the baseline of later ones.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.options import Commands, add_overrides
from roll_core.errors import UserError

if TYPE_CHECKING:
    from roll_core.config.run import RunConfig

DEFAULT_CONFIG = "configs/nightly.yaml"


def add(commands: Commands) -> None:
    """Declare `roll nightly`."""
    parser = commands.add_parser(
        "nightly",
        help="train the reference runs and compare them with those accepted before; 0: none is worse",
        description=__doc__,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
    add_overrides(parser, "for all of them")
    parser.add_argument(
        "--accept",
        metavar="RUN",
        help="train nothing; take a rejected run for what later ones are compared with from now on",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the flow `nightly` and print one verdict per reference run; the flow raises if one is worse."""
    from flows.prefect_server import prefect_api
    from roll_core.config.load import load_config, load_nightly
    from roll_core.reporting.regression import verdict_sentence
    from roll_core.reporting.stage_log import PROGRESS_LOGGER

    plan = load_nightly(options.config)
    configs = [load_config(r.config, [*r.overrides, *options.overrides]) for r in plan.references]
    if options.accept:
        return _accept(options.accept, configs)
    progress = logging.getLogger(PROGRESS_LOGGER)
    progress.setLevel(logging.INFO)
    progress.addHandler(logging.StreamHandler(sys.stdout))
    with prefect_api(Path(configs[0].work_dir)):
        from flows.nightly import nightly

        for verdict in nightly(options.config, options.overrides):
            print(verdict_sentence(verdict))
    return 0


def _accept(run_id: str, configs: "list[RunConfig]") -> int:
    """Restart the baseline of a reference with a run that was rejected."""
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.runs import find_run
    from tasks.nightly import open_baselines

    name = run_id.rpartition("-")[0]
    config = next((config for config in configs if config.name == name), None)
    if config is None:
        known = ", ".join(config.name for config in configs)
        raise UserError(f"--accept: {run_id} is no run of a reference; they are runs of: {known}")
    open_baselines(config).restart_from(find_run(ObjectStore(config.store.uri), run_id, "--accept"))
    print(f"{run_id} is accepted; later runs of {name} are compared with it and with what follows it")
    return 0
