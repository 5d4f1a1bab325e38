"""Print what a config would run, without starting anything.

Says whether it fits into memory, how long it takes and what it costs; lists stages, roles, batch arithmetic, memory and
faster layouts; and, for a SLURM launcher, the script of a leg.
"""

import argparse
from typing import TYPE_CHECKING

from flows.cli.options import Commands, add_config

if TYPE_CHECKING:
    from roll_core.planning.plan import PlanSection


def add(commands: Commands) -> None:
    """Declare `roll plan`."""
    parser = commands.add_parser("plan", help="print what a config would run; touches nothing", description=__doc__)
    add_config(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Check the config as far as possible without its machines, then print the plan."""
    from flows.cli import sbatch
    from roll_core.config.load import load_config
    from roll_core.config.operations.legs import SlurmLauncherConfig
    from roll_core.planning.architectures import check_architecture
    from roll_core.planning.plan import describe_plan
    from roll_core.planning.preflight import check_experts, check_fits, check_layout, check_lora_targets

    config = load_config(options.config, options.overrides)
    check_architecture(config)
    check_layout(config)
    check_experts(config)
    check_lora_targets(config)
    check_fits(config)
    for section in describe_plan(config):
        print_section(section)
    if isinstance(config.legs.launcher, SlurmLauncherConfig):
        print("script of a leg: roll sbatch")
        return sbatch.run(options)
    return 0


def print_section(section: "PlanSection") -> None:
    """Print a title and, indented, one line per row."""
    print(section.title)
    for label, text in section.rows:
        print(f"  {label:<15} {text}")
