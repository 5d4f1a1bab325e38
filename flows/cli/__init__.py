"""The command `roll`: one module per command, each with `add` (declares it) and `run` (executes it).

Modules import at the top only what parsing needs, and everything else inside `run`: --help and plan stay quick on a login
node.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from flows.cli import (
    config,
    export,
    fork,
    gc,
    leg,
    models,
    nightly,
    nodes,
    plan,
    replay,
    resume,
    run,
    runs,
    sbatch,
    show,
    simulate,
    up,
)
from flows.cli.follow import INTERRUPTED
from roll_core.errors import RollError, UserError, shorten
from roll_core.host import path_fault

COMMANDS = (
    *(run, plan, config, sbatch, leg, simulate),
    *(resume, replay, fork, export, gc, runs, show, nodes),
    *(models, nightly, up),
)
"""Modules of all commands, in the order in which `roll --help` lists them."""

OUTPUT_CLOSED = 141
"""Exit code of a command whose output was closed before its end: 128 + SIGPIPE, as shells report it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; a `RollError` is printed as one sentence, without a traceback."""
    options = build_parser().parse_args(arguments)
    try:
        _check_arguments(options)
        exit_code = options.command(options)
        sys.stdout.flush()
        return exit_code
    except RollError as error:
        print(f"roll: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # a pager or `head` has read enough; Python flushes once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _check_arguments(options: argparse.Namespace) -> None:
    """Raise UserError if an argument cannot be the name of a file, a folder or a run."""
    for name, value in vars(options).items():
        fault = path_fault(value) if isinstance(value, str) else None
        if fault is not None:
            raise UserError(f"{name.upper()}: '{shorten(value, 80)}' {fault}")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `roll` with the sub-parsers of all commands."""
    parser = argparse.ArgumentParser(
        prog="roll", description="Reinforcement learning of language models that cannot lose work."
    )
    parser.add_argument(
        "--version", action=_PrintVersion, nargs=0, default=argparse.SUPPRESS, help="print the version and exit"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser


class _PrintVersion(argparse.Action):
    """Option that prints the version and exits. Reads the package metadata only when it is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from roll_core.provenance import release_version

        print(f"roll {release_version()}")
        parser.exit()
