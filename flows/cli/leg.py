"""Run one leg in the SLURM allocation this process is a task of. The scripts that `roll sbatch` prints call this command."""

import argparse
import os

from flows.cli.options import Commands, add_config
from roll_core.errors import UserError


def add(commands: Commands) -> None:
    """Declare `roll leg`."""
    parser = commands.add_parser(
        "leg", help="carry a run on in the SLURM allocation this is part of; scripts of sbatch call it", description=__doc__
    )
    add_config(parser)
    parser.add_argument("--run", required=True, metavar="RUN", help="its name; opened if there is none of that name yet")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the leg as task 0 of the job, or join its Ray cluster as another task.

    Returns REQUEUE_EXIT_CODE if the script should requeue the job for another leg.
    """
    from flows.leg_process import run_train_leg
    from flows.rlvr import next_leg, should_requeue
    from roll_core.config.load import load_config
    from roll_core.types.leg import LegEnding
    from tasks.legs import REQUEUE_EXIT_CODE, join_leg_here, run_leg_here
    from tasks.runs import open_or_find

    if "SLURM_PROCID" not in os.environ:
        raise UserError("roll leg: this is no task of a SLURM job: submit the script that `roll sbatch CONFIG` prints")
    if os.environ["SLURM_PROCID"] != "0":
        join_leg_here(load_config(options.config, options.overrides), options.run)
        return 0
    run_ref = open_or_find(options.config, options.overrides, options.run)
    ended = run_leg_here(run_ref, next_leg(run_ref), run_train_leg)
    if ended.ending is LegEnding.FINISHED:
        return 0
    print(f"roll: leg {ended.leg} of {run_ref.run_id}: {ended.ending} at iteration {ended.last_iteration} {ended.cause}")
    return REQUEUE_EXIT_CODE if should_requeue(run_ref, ended, int(os.environ.get("SLURM_RESTART_COUNT", "0"))) else 1
