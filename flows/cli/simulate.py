"""Predict how fast a config would run: the real rollout scheduler in virtual time, on simulated machines.

The speeds of machines and the lengths of completions are fitted to a recorded run (--trace), or assumed from the config.
Nothing is started or written but the page of --timeline.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.options import Commands, add_config, add_store
from flows.cli.plan import print_section
from roll_core.errors import UserError

if TYPE_CHECKING:
    from roll_core.simulation.workload import Workload

DEFAULT_ITERATIONS = 6
"""Iterations to simulate if neither --iterations nor a recorded run says how many."""


def add(commands: Commands) -> None:
    """Declare `roll simulate`."""
    parser = commands.add_parser(
        "simulate", help="predict how fast a config would run, in virtual time; touches nothing", description=__doc__
    )
    add_config(parser)
    parser.add_argument("--trace", metavar="RUN", help="take machines and lengths from what this run recorded")
    parser.add_argument(
        "--iterations", type=int, metavar="N", help=f"to simulate (default: as many as RUN had, or {DEFAULT_ITERATIONS})"
    )
    parser.add_argument("--recommend", action="store_true", help="try other settings, too, and list the quickest")
    parser.add_argument("--timeline", metavar="FILE", help="write who would be busy when, as an HTML page")
    add_store(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Simulate the config and print the machines, the prediction and, with --recommend, faster settings."""
    from roll_core.config.load import absolute_uri, load_config
    from roll_core.reporting.timeline import timeline_html
    from roll_core.simulation.assumptions import assumed_models, assumed_workload
    from roll_core.simulation.fitting import fit_models
    from roll_core.simulation.recorded import read_recorded
    from roll_core.simulation.report import candidate_rows, describe_machines, describe_prediction
    from roll_core.simulation.simulator import recommend, simulate
    from roll_core.simulation.workload import recorded_workload
    from roll_core.store.object_store import ObjectStore

    config = load_config(options.config, options.overrides)
    if options.iterations is not None and options.iterations < 1:
        raise UserError(f"--iterations ({options.iterations}) must be at least 1")
    recorded = read_recorded(ObjectStore(absolute_uri(options.store)), options.trace) if options.trace else None
    workload: Workload
    if recorded is None:
        models, workload = assumed_models(config), assumed_workload(config)
        origin = "as assumed; --trace RUN takes those of a run"
    else:
        models = fit_models(recorded.config, recorded.warm_traces, recorded.warm_timings)
        workload = recorded_workload((trace for traces in recorded.traces for trace in traces), config.seed)
        origin = f"as fitted to {len(recorded.warm_timings)} iterations of {options.trace}"
    num_iterations = options.iterations or (len(recorded.timings) if recorded else DEFAULT_ITERATIONS)
    prediction = simulate(config, models, workload, num_iterations)
    measured = None if recorded is None else recorded.seconds_per_iteration
    for section in (describe_machines(models, workload, origin), describe_prediction(prediction, measured)):
        print_section(section)
    if options.timeline:
        _write_page(options.timeline, timeline_html(prediction.stages, prediction.traces, f"{config.name}, simulated"))
    if options.recommend:
        print("other settings, the quickest first; training is taken to scale with the number of devices that train")
        for row in candidate_rows(recommend(config, models, workload, num_iterations)):
            print(f"  {row}")
    return 0


def _write_page(file: str, page: str) -> None:
    try:
        Path(file).write_text(page)
    except OSError as error:
        raise UserError(f"--timeline: cannot write {file} ({error.strerror}): name another file") from None
