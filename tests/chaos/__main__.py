"""Break real runs on purpose and compare them, bit by bit, with a run that nothing happened to.

  python -m tests.chaos --output PAGE     the whole experiment, on a tiny model: up to an hour on two cores
  python -m tests.chaos --short           a few faults of each kind
  python -m tests.chaos --config CONFIG   kill processes in runs of a config of yours, in this folder

The whole experiment kills every process of a run with SIGKILL at every stage. Then it runs on an S3 store behind a faulty
proxy, and kills the S3, MLflow and Prefect servers, which come back or stay away. At last it sends random signals to random
processes at random moments (`storm.py`). Compared are the weights, rollouts and metrics of every iteration. Exit code 1: a
committed iteration was lost, a result differs, or a command hung or ended without one sentence that says why.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.cli.options import add_overrides
from flows.prefect_server import prefect_api
from roll_core.config.load import load_config
from roll_core.errors import RollError
from roll_core.types.refs import RunRef
from tests.chaos.kill_points import VICTIMS
from tests.chaos.outcomes import BrokenRun
from tests.chaos.report import defects, page, short_report, storm_defects, summary_sentence
from tests.chaos.storm import Storm, run_storms
from tests.support import ROOT

NUM_ITERATIONS = 10
TINY_CONFIG = f"""
extends: {ROOT}/configs/clusters/laptop.yaml
name: chaos
iterations: {NUM_ITERATIONS}
model: {{kind: scratch, max_positions: 32}}
problems: {{kind: arithmetic, puzzle: sort, digits: 3}}
reward: {{kind: exact_match, partial_credit: 0.5}}
warm_start: {{steps: 10}}
rollout: {{num_groups: 4, group_size: 4, max_new_tokens: 5}}
training: {{optimizer: {{learning_rate: 1.0e-3}}}}
evaluation: {{every: 2, num_problems: 8}}
checkpoint: {{every: 4}}
legs: {{max_failures: 0}}
tracking: {{drain_seconds: 5}}
"""
PARTS = ("kills", "store", "mlflow", "prefect", "storm")
ALL_KILLS = 8 * len(VICTIMS)
"""Number of kill points that visit every victim at every stage; the tiny model has no stage update_critic."""
KILLS_OF_CONFIG, SHORT_KILLS = 40, 3
"""Default number of kill points with --config, and with --short."""
STORM_EVENTS, SHORT_STORM_EVENTS = 60, 4
"""Number of random signals of all storms, and of those with --short."""


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment that the options ask for; return 1 if it found defects."""
    options = parse_options(arguments)
    try:
        found, report = break_config(options) if options.config else break_everything(options)
    except RollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(report)
    if options.output:
        options.output.write_text(report.rstrip("\n") + "\n")
    return 1 if found else 0


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with a usage message if options contradict each other."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="kill processes in runs of this config (default: a tiny model, and services too)")
    add_overrides(parser, "override a key of CONFIG")
    parser.add_argument(
        "--kills", type=int, metavar="N", help=f"kill points (default: {ALL_KILLS}, or {KILLS_OF_CONFIG} with --config)"
    )
    parser.add_argument("--per-run", type=int, default=5, metavar="N", help="most kills in one run (default: 5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the drawing of kill points (default: 0)")
    parser.add_argument(
        "--short", action="store_true", help=f"a few faults of each kind: {SHORT_KILLS} kills, one way for the store to fail"
    )
    parser.add_argument("--only", default="", metavar="PARTS", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, too (default: only print it)")
    options = parser.parse_args(arguments)
    if options.config and (options.short or options.only):
        parser.error("--short and --only are parts of the whole experiment: leave out --config")
    if options.overrides and not options.config:
        parser.error("--set overrides keys of CONFIG: give --config")
    if unknown := set(parts_of(options)) - set(PARTS):
        parser.error(f"--only: there is no part {', '.join(sorted(unknown))}: name some of {','.join(PARTS)}")
    return options


def break_config(options: argparse.Namespace) -> tuple[list[str], str]:
    """Kill processes in runs of a config; return the defects and a report."""
    config = load_config(options.config, options.overrides)
    kills = KILLS_OF_CONFIG if options.kills is None else options.kills
    with prefect_api(Path(config.work_dir)):
        from tests.chaos.flow import chaos

        outcome = chaos(options.config, options.overrides, kills, options.per_run, options.seed)
    return defects(outcome.broken), short_report(outcome.broken)


def break_everything(options: argparse.Namespace) -> tuple[list[str], str]:
    """Run the tiny model in a temporary folder, kill its processes, break its services; return the defects and a report."""
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, contextlib.chdir(name):
        folder, config = Path(name), Path(name) / "chaos.yaml"
        config.write_text(TINY_CONFIG)
        with prefect_api(folder):
            from tests.chaos.flow import chaos
            from tests.chaos.service_faults import FAULT_SECONDS

            outcome = chaos(str(config), [], num_kills(options), options.per_run, options.seed)
            print(summary_sentence(outcome.broken), flush=True)
            services = []
            for run in break_services(options, config, folder, outcome.unbroken):
                for recovery in run.recoveries:
                    print(f"{recovery.point.victim}, {recovery.point.event_name}: {recovery.verdict}", flush=True)
                services.append(run)
            storms = list(break_by_storms(options, config))
    minutes = (time.monotonic() - began_at) / 60
    report = page(outcome, services, storms, minutes, NUM_ITERATIONS, FAULT_SECONDS)
    return defects([*outcome.broken, *services]) + storm_defects(storms), report


def num_kills(options: argparse.Namespace) -> int:
    """Number of kill points of the whole experiment."""
    if "kills" not in parts_of(options):
        return 0
    if options.short:
        return SHORT_KILLS
    return ALL_KILLS if options.kills is None else options.kills


def break_services(options: argparse.Namespace, config: Path, folder: Path, unbroken: RunRef) -> Iterator[BrokenRun]:
    """Break the chosen services one after the other, in runs of a config."""
    from tests.chaos.service_faults import STORE_FAULTS, break_mlflow, break_prefect, break_store

    parts = parts_of(options)
    if "store" in parts:
        faults = dict(list(STORE_FAULTS.items())[:1]) if options.short else STORE_FAULTS
        yield from break_store(config, folder, unbroken, faults)
    if "mlflow" in parts:
        yield from break_mlflow(config, folder, unbroken)
    if "prefect" in parts:
        yield from break_prefect(config, folder, unbroken)


def break_by_storms(options: argparse.Namespace, config: Path) -> Iterator[Storm]:
    """Send random signals to the processes of runs of a config, if that part was chosen."""
    if "storm" not in parts_of(options):
        return
    for storm in run_storms(str(config), SHORT_STORM_EVENTS if options.short else STORM_EVENTS, options.seed):
        print(f"storm, {storm.variant}: {len(storm.events)} events, {len(storm.differences)} differences", flush=True)
        yield storm


def parts_of(options: argparse.Namespace) -> Sequence[str]:
    """Chosen parts of the whole experiment; all of them without --only."""
    return options.only.split(",") if options.only else PARTS


if __name__ == "__main__":
    sys.exit(main())
