"""Print a script for `sbatch` that trains a run leg after leg by itself, without a flow on another machine."""

import argparse

from flows.cli.options import Commands, add_config


def add(commands: Commands) -> None:
    """Declare `roll sbatch`."""
    parser = commands.add_parser(
        "sbatch", help="print a script for sbatch that carries a run of a config by itself", description=__doc__
    )
    add_config(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print the script; the user submits it."""
    from roll_core.config.load import load_config
    from tasks.leg_requests import sbatch_script

    print(sbatch_script(load_config(options.config, options.overrides), options.config, options.overrides))
    return 0
