"""Arguments that several commands share: CONFIG, --set, --store and RUN@ITERATION, declared and parsed in one place."""

import argparse
import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from roll_core.errors import RollError, UserError
from roll_core.host import remedy

DEFAULT_STORE = "roll-data/store"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Return type of `ArgumentParser.add_subparsers`, to which each command adds its own parser."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare the argument CONFIG and the option --set."""
    parser.add_argument("config", metavar="CONFIG", help="a file such as configs/runs/quickstart.yaml")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, description: str = "override a key") -> None:
    """Declare the option --set, which may be given several times; the values are in `options.overrides`."""
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=description)


def add_store(parser: argparse.ArgumentParser) -> None:
    """Declare the option --store, the folder or address of the object store."""
    parser.add_argument("--store", default=DEFAULT_STORE, help=f"where runs are kept (default: {DEFAULT_STORE})")


def store_option(store_uri: str) -> str:
    """Text of the --store option to append to a suggested command; empty for the default store."""
    from roll_core.config.load import absolute_uri

    return "" if store_uri == absolute_uri(DEFAULT_STORE) else f" --store {store_uri}"


def parse_run_and_iteration(text: str) -> tuple[str, int]:
    """Split RUN@ITERATION into the run's id and the iteration. Example: 'quickstart-1@12' -> ('quickstart-1', 12)."""
    run_id, at, iteration = text.rpartition("@")
    if not at or not run_id or not (iteration.isascii() and iteration.isdecimal()):
        raise UserError(f"RUN@ITERATION: '{text}' is not one; write it like quickstart-1@12")
    return run_id, int(iteration)


@contextlib.contextmanager
def create_folder(folder: Path) -> Iterator[Path]:
    """Create the FOLDER of a command atomically: the block fills a temporary folder, which is renamed if the block succeeds.

    Raises `UserError` if the folder exists and is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"FOLDER: {folder} is there already: name a new one, or empty it")
    partial = folder.absolute().with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(folder)
    except RollError:
        raise
    except OSError as error:
        raise UserError(f"FOLDER: cannot write to {folder} ({error.strerror}): {remedy(error)} or name another") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
