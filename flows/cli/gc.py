"""Remove the objects of a store that no manifest, checkpoint or export of any run names."""

import argparse
import math

from flows.cli.options import Commands, add_store


def add(commands: Commands) -> None:
    """Declare `roll gc`."""
    parser = commands.add_parser("gc", help="remove what no run in a store needs", description=__doc__)
    parser.add_argument(
        "--older-than",
        type=_minutes,
        metavar="MINUTES",
        help="leave what is younger: a run may be about to name it (default: the longest store.grace_minutes of the runs)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    add_store(parser)
    parser.set_defaults(command=run)


def _minutes(text: str) -> float:
    """Parse a number of minutes; argparse prints the sentence of an ArgumentTypeError and exits with 2."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0.0 <= minutes < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of minutes: give 0 or more, as --older-than 60")
    return minutes


def run(options: argparse.Namespace) -> int:
    """Find the garbage, remove it unless --dry-run is given, and print its number and size."""
    from roll_core.config.load import absolute_uri
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.upkeep.garbage import find_garbage, longest_grace_minutes, remove

    store = ObjectStore(absolute_uri(options.store))
    minutes = longest_grace_minutes(store) if options.older_than is None else options.older_than
    garbage = find_garbage(store, minutes * 60)
    sizes = [stored.size for stored in (garbage if options.dry_run else remove(store, garbage))]
    done = "would be removed" if options.dry_run else "removed"
    print(f"{len(sizes)} objects, {sum(sizes) / 1e6:.1f} MB, that no run names and that are {minutes:g} minutes old: {done}")
    if not options.dry_run:
        print(f"{store.remove_unfinished(minutes * 60)} unfinished writes: removed")
    return 0
