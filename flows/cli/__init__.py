"""The `roll` command. Imports only what a command needs, when it needs it: --help and plan stay quick on a login node."""

import argparse
import contextlib
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import RollError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from roll_core.config.run import RunConfig
    from roll_core.planning.plan import PlanSection
    from roll_core.store.records.runs import RunSummary
    from roll_core.types.refs import RunRef

SIMULATED_ITERATIONS = 6
DEFAULT_STORE = "roll-data/store"
DEFAULT_NIGHTLY = "configs/nightly.yaml"
INTERRUPTED = 130
DIFFERENT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a failure that is not a bug is one sentence and an exit code."""
    options = build_parser().parse_args(arguments)
    try:
        return options.command(options)
    except RollError as error:
        print(f"roll: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll", description="Reinforcement learning of language models that cannot lose work."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="start a run of a config and follow it to the end")
    run.add_argument("config", metavar="CONFIG", help="a file such as configs/runs/quickstart.yaml")
    run.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    run.set_defaults(command=run_command)

    plan = commands.add_parser("plan", help="print what a config would run; touches nothing")
    plan.add_argument("config", metavar="CONFIG")
    plan.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    plan.set_defaults(command=plan_command)

    sbatch = commands.add_parser("sbatch", help="print a script for sbatch that carries a run of a config by itself")
    sbatch.add_argument("config", metavar="CONFIG")
    sbatch.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    sbatch.set_defaults(command=sbatch_command)

    leg = commands.add_parser(
        "leg", help="carry a run on in the SLURM allocation this is part of; scripts of sbatch call it"
    )
    leg.add_argument("config", metavar="CONFIG")
    leg.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    leg.add_argument("--run", required=True, metavar="RUN", help="its name; opened if there is none of that name yet")
    leg.set_defaults(command=leg_command)

    simulate = commands.add_parser("simulate", help="predict how fast a config would run, in virtual time; touches nothing")
    simulate.add_argument("config", metavar="CONFIG")
    simulate.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    simulate.add_argument("--trace", metavar="RUN", help="take machines and lengths from what this run recorded")
    simulate.add_argument(
        "--iterations", type=int, metavar="N", help=f"to simulate (default: as many as RUN had, or {SIMULATED_ITERATIONS})"
    )
    simulate.add_argument("--recommend", action="store_true", help="try other settings, too, and list the quickest")
    simulate.add_argument("--timeline", metavar="FILE", help="write who would be busy when, as an HTML page")
    simulate.set_defaults(command=simulate_command)

    resume = commands.add_parser("resume", help="carry on a run that was stopped, killed or lost")
    resume.add_argument("run", metavar="RUN")
    resume.set_defaults(command=resume_command)

    replay = commands.add_parser("replay", help="make the update of a committed iteration again and compare; 0: equal")
    replay.add_argument("place", metavar="RUN@ITERATION", help="for example quickstart-1@12")
    replay.set_defaults(command=replay_command)

    fork = commands.add_parser("fork", help="a new run that goes on from another's iteration with another config")
    fork.add_argument("place", metavar="RUN@ITERATION", help="for example quickstart-1@20")
    fork.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    fork.set_defaults(command=fork_command)

    export = commands.add_parser("export", help="write the policy of a checkpoint as a Hugging Face folder")
    export.add_argument(
        "place", metavar="RUN[@ITERATION]", help="for example quickstart-1@20; the newest checkpoint without @"
    )
    export.add_argument("folder", metavar="FOLDER", help="must not exist yet, or be empty")
    export.set_defaults(command=export_command)

    gc = commands.add_parser("gc", help="remove what no run in a store needs")
    gc.add_argument(
        "--older-than",
        type=float,
        metavar="MINUTES",
        help="leave what is younger: a run may be about to name it (default: the longest store.grace_minutes of the runs)",
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.set_defaults(command=gc_command)

    runs = commands.add_parser("runs", help="list the runs in a store")
    runs.set_defaults(command=runs_command)

    show = commands.add_parser("show", help="show one run: its curve, its iterations, where things are")
    show.add_argument("run", metavar="RUN")
    show.set_defaults(command=show_command)

    nodes = commands.add_parser("nodes", help="nodes that failed, and which of them later legs leave out")
    nodes.add_argument("--clear", nargs="+", default=[], metavar="NODE", help="forget the failures of these")
    nodes.set_defaults(command=nodes_command)

    for command in (simulate, resume, replay, fork, export, gc, runs, show, nodes):
        command.add_argument("--store", default=DEFAULT_STORE, help=f"where runs are kept (default: {DEFAULT_STORE})")

    models = commands.add_parser("models", help="real models to train: import one, list those that are there")
    actions = models.add_subparsers(required=True, metavar="ACTION")
    imports = actions.add_parser("import", help="write a model as a Hugging Face folder, unless it is there already")
    imports.add_argument("name", metavar="NAME", help="one that `roll models list` knows, or a file such as Qwen3-0.6B.gguf")
    imports.add_argument("--to", metavar="FOLDER", help="where to (default: roll-data/models/NAME)")
    imports.set_defaults(command=models_import_command)
    listing = actions.add_parser("list", help="the models in roll-data/models, and those that can be imported by name")
    listing.set_defaults(command=models_list_command)

    chaos = commands.add_parser(
        "chaos", help="break runs of a config on purpose and compare them with an unbroken one; 0: equal"
    )
    chaos.add_argument("config", metavar="CONFIG")
    chaos.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    chaos.add_argument("--kills", type=int, default=40, help="kill points, over processes, stages, iterations (default: 40)")
    chaos.add_argument(
        "--per-run", type=int, default=5, help="kills of one run, which is resumed where it does not survive (default: 5)"
    )
    chaos.add_argument("--seed", type=int, default=0, help="of the drawing of kill points")
    chaos.set_defaults(command=chaos_command)

    nightly = commands.add_parser(
        "nightly", help="train the reference runs and compare them with those accepted before; 0: none is worse"
    )
    nightly.add_argument("config", metavar="CONFIG", nargs="?", default=DEFAULT_NIGHTLY, help=f"default: {DEFAULT_NIGHTLY}")
    nightly.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all of them")
    nightly.add_argument(
        "--accept",
        metavar="RUN",
        help="train nothing; take a rejected run for what later ones are compared with from now on",
    )
    nightly.set_defaults(command=nightly_command)

    up = commands.add_parser("up", help="start a Prefect server, a worker with the deployments, and the MLflow page")
    up.add_argument("--prefect-port", type=int, default=4200)
    up.add_argument("--mlflow-port", type=int, default=5000)
    up.add_argument("--tracking", default="sqlite:///roll-data/mlflow.db", metavar="URI", help="MLflow tracking address")
    up.set_defaults(command=up_command)
    return parser


def run_command(options: argparse.Namespace) -> int:
    from roll_core.config.load import load_config
    from roll_core.planning.preflight import check_ready

    config = load_config(options.config, options.overrides)
    check_ready(config)
    return _follow(config, config.store.uri, "rlvr", {"config": options.config, "overrides": options.overrides})


def resume_command(options: argparse.Namespace) -> int:
    from roll_core.config.load import absolute_uri
    from roll_core.planning.preflight import check_ready
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.runs import find_run, read_config

    store_uri = absolute_uri(options.store)
    config = read_config(find_run(ObjectStore(store_uri), options.run))
    check_ready(config)
    return _follow(config, store_uri, "rlvr_resume", {"run_id": options.run, "store": store_uri})


def replay_command(options: argparse.Namespace) -> int:
    from flows.prefect_server import prefect_api
    from roll_core.config.load import absolute_uri
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.runs import find_run, read_chain, read_config, refuse_unless_learned

    run_id, iteration = _place(options.place)
    store_uri = absolute_uri(options.store)
    store = ObjectStore(store_uri)
    config = read_config(find_run(store, run_id))
    refuse_unless_learned(read_chain(store, run_id), run_id, iteration)
    with prefect_api(Path(config.work_dir)):
        from flows.replay import replay

        replayed = replay(run_id, iteration, store_uri)
    for quantity in replayed.compared:
        different = next((d for d in replayed.differences if d.quantity == quantity), None)
        found = f"committed {different.committed}, replayed {different.replayed}" if different else "equal"
        print(f"{quantity:<22} {found}")
    return DIFFERENT if replayed.differences else 0


def fork_command(options: argparse.Namespace) -> int:
    from roll_core.config.load import absolute_uri
    from roll_core.planning.preflight import check_ready
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.forks import forked_config

    run_id, iteration = _place(options.place)
    store_uri = absolute_uri(options.store)
    config = forked_config(ObjectStore(store_uri), run_id, iteration, options.overrides)
    check_ready(config)
    parameters = {"run_id": run_id, "iteration": iteration, "store": store_uri, "overrides": options.overrides}
    return _follow(config, store_uri, "rlvr_fork", parameters)


def export_command(options: argparse.Namespace) -> int:
    from roll_core.config.load import absolute_uri
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.checkpoints import download_files
    from roll_core.store.records.exports import find_export, manifest_to_export
    from roll_core.store.records.runs import find_run, read_config

    run_id, iteration = _place(options.place) if "@" in options.place else (options.place, None)
    store_uri = absolute_uri(options.store)
    store = ObjectStore(store_uri)
    config = read_config(find_run(store, run_id))
    manifest = manifest_to_export(store, run_id, iteration)
    stored = find_export(store, manifest)
    with _new_folder(Path(options.folder)) as folder:
        if stored is not None:
            download_files(store, stored, folder)
        else:
            _export_by_roles(config, run_id, manifest.iteration, store_uri, folder)
    print(f"the policy of {run_id}@{manifest.iteration} is in {options.folder}")
    return 0


def _export_by_roles(config: "RunConfig", run_id: str, iteration: int, store_uri: str, folder: Path) -> None:
    from flows.prefect_server import prefect_api

    with prefect_api(Path(config.work_dir)):
        from flows.export import export

        export(run_id, iteration, store_uri, str(folder))


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that appears with all its files, or not at all."""
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
        raise UserError(f"FOLDER: cannot write to {folder} ({error.strerror}): make it writable or name another") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def models_import_command(options: argparse.Namespace) -> int:
    from flows.models import default_folder, is_model, write_model

    there = Path(options.to) if options.to else default_folder(options.name)
    if is_model(there):
        print(f"{options.name} is in {there} already")
        return 0
    with _new_folder(there) as folder:
        write_model(options.name, folder)
    print(f"{options.name} is in {there}: model: {{kind: pretrained, path: {there}}}")
    return 0


def models_list_command(_: argparse.Namespace) -> int:
    from flows.models import list_models

    for model in list_models():
        print(f"{model.name:<20} {model.folder}  {model.says}")
    return 0


def gc_command(options: argparse.Namespace) -> int:
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


def _place(text: str) -> tuple[str, int]:
    run_id, at, iteration = text.rpartition("@")
    if not at or not run_id or not iteration.isdigit():
        raise UserError(f"RUN@ITERATION: '{text}' is not one; write it like quickstart-1@12")
    return run_id, int(iteration)


def plan_command(options: argparse.Namespace) -> int:
    from roll_core.config.load import load_config
    from roll_core.config.operations.legs import SlurmLauncherConfig
    from roll_core.planning.plan import describe_plan
    from roll_core.planning.preflight import check_experts, check_layout, check_room, check_targets

    config = load_config(options.config, options.overrides)
    check_layout(config)
    check_experts(config)
    check_targets(config)
    check_room(config)
    for section in describe_plan(config):
        _print_section(section)
    if isinstance(config.legs.launcher, SlurmLauncherConfig):
        print("script of a leg: roll sbatch")
        return sbatch_command(options)
    return 0


def sbatch_command(options: argparse.Namespace) -> int:
    from roll_core.config.load import load_config
    from tasks.leg_requests import sbatch_script

    print(sbatch_script(load_config(options.config, options.overrides), options.config, options.overrides))
    return 0


def leg_command(options: argparse.Namespace) -> int:
    from flows.leg_process import run_train_leg
    from flows.rlvr import next_leg, should_follow
    from roll_core.config.load import load_config
    from roll_core.types.leg import LegEnding
    from tasks.legs import CHAINED, join_leg_here, run_leg_here
    from tasks.runs import open_or_find

    if "SLURM_PROCID" not in os.environ:
        raise UserError("roll leg: this is no task of a SLURM job: submit the script that `roll sbatch CONFIG` prints")
    if os.environ["SLURM_PROCID"] != "0":
        join_leg_here(load_config(options.config, options.overrides), options.run)
        return 0
    run = open_or_find(options.config, options.overrides, options.run)
    ended = run_leg_here(run, next_leg(run), run_train_leg)
    if ended.ending is LegEnding.FINISHED:
        return 0
    print(f"roll: leg {ended.leg} of {run.run_id}: {ended.ending} at iteration {ended.last_iteration} {ended.cause}")
    return CHAINED if should_follow(run, ended, int(os.environ.get("SLURM_RESTART_COUNT", "0"))) else 1


def _print_section(section: "PlanSection") -> None:
    print(section.title)
    for label, text in section.rows:
        print(f"  {label:<15} {text}")


def simulate_command(options: argparse.Namespace) -> int:
    from roll_core.config.load import absolute_uri, load_config
    from roll_core.reporting.timeline import timeline_html
    from roll_core.simulation.assumptions import assumed_models, assumed_workload
    from roll_core.simulation.fitting import fit_models
    from roll_core.simulation.recorded import read_recorded
    from roll_core.simulation.report import candidate_rows, describe_machines, describe_prediction
    from roll_core.simulation.simulator import recommend, simulate
    from roll_core.simulation.workload import Workload, recorded_workload
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
    num_iterations = options.iterations or (len(recorded.timings) if recorded else SIMULATED_ITERATIONS)
    prediction = simulate(config, models, workload, num_iterations)
    measured = None if recorded is None else recorded.seconds_per_iteration
    for section in (describe_machines(models, workload, origin), describe_prediction(prediction, measured)):
        _print_section(section)
    if options.timeline:
        page = timeline_html(prediction.stages, prediction.traces, f"{config.name}, simulated")
        try:
            Path(options.timeline).write_text(page)
        except OSError as error:
            raise UserError(f"--timeline: cannot write {options.timeline} ({error.strerror}): name another file") from None
    if options.recommend:
        print("other settings, the quickest first; training is taken to scale with the number of devices that train")
        for row in candidate_rows(recommend(config, models, workload, num_iterations)):
            print(f"  {row}")
    return 0


def runs_command(options: argparse.Namespace) -> int:
    from roll_core.config.load import absolute_uri
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.runs import find_run, read_chain, read_config, stored_config

    store = ObjectStore(absolute_uri(options.store))
    run_ids = list(store.list("runs"))
    if not run_ids:
        print(f"no runs in {store.uri} yet; start one with: roll run configs/runs/quickstart.yaml")
    for run_id in run_ids:
        try:
            if not stored_config(store, run_id):
                continue
            total = read_config(find_run(store, run_id)).iterations
            chain = read_chain(store, run_id)
        except RollError as error:
            print(f"{run_id:<24} unreadable: {error}")
            continue
        accuracy = next((m.evaluated.accuracy for m in reversed(chain) if m.evaluated), None)
        reached = chain[-1].iteration if chain else 0
        state = "finished" if reached == total else f"resumable: roll resume {run_id}"
        shown = "-" if accuracy is None else f"{accuracy:.2f}"
        print(f"{run_id:<24} iteration {reached:>5}/{total:<5} accuracy {shown:<5} {state}")
    return 0


def show_command(options: argparse.Namespace) -> int:
    from rich.console import Console

    from flows.cli.progress_view import HEADER, iteration_row
    from roll_core.config.load import absolute_uri
    from roll_core.config.operations.legs import SlurmLauncherConfig
    from roll_core.data.ledger import totals
    from roll_core.reporting.goodput import commits_in_chain, engines_over_time, leg_histories, leg_rows
    from roll_core.reporting.stage_log import read_stages_by_leg
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.forks import lineage
    from roll_core.store.records.runs import find_run, read_chain, read_config, summary_of

    store = ObjectStore(absolute_uri(options.store))
    run = find_run(store, options.run)
    chain = read_chain(store, run.run_id)
    console = Console()
    accuracy = None
    console.print(HEADER, style="dim", highlight=False)
    for manifest in chain:
        accuracy = manifest.evaluated.accuracy if manifest.evaluated else accuracy
        console.print(iteration_row(manifest, accuracy), highlight=False, soft_wrap=True)
    config = read_config(run)
    for ancestor in lineage(store, config):
        console.print(f"forked   {ancestor.run_id}@{ancestor.iteration}: {', '.join(ancestor.changes)}", highlight=False)
    histories = leg_histories(read_stages_by_leg(Path(config.work_dir) / run.run_id), commits_in_chain(chain))
    for row in leg_rows(histories) if histories else ():
        console.print(row, highlight=False, soft_wrap=True)
    if config.legs.elastic is not None:
        console.print(f"engines  {engines_over_time(chain)}", highlight=False, soft_wrap=True)
    if drawn := totals(chain):
        console.print(f"problems {drawn}", highlight=False)
    if isinstance(config.legs.launcher, SlurmLauncherConfig) and shutil.which("squeue"):
        _say_what_jobs_do(console, run)
    _say_where_to_look(console, run, config, summary_of(run.run_id, chain))
    return 0


def nodes_command(options: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    from roll_core.config.load import absolute_uri
    from roll_core.config.operations.legs import NodesConfig
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.nodes import clear_failures, excluded_nodes, read_failures

    store = ObjectStore(absolute_uri(options.store))
    known = read_failures(store)
    if options.clear:
        if unknown := sorted(set(options.clear) - known.keys()):
            raise UserError(f"--clear: nothing is known of {', '.join(unknown)}; known nodes: {', '.join(known) or 'none'}")
        print(f"{clear_failures(store, options.clear)} failures of {', '.join(options.clear)}: forgotten")
        return 0
    if not known:
        print(f"no failures of nodes in {store.uri}")
    policy = NodesConfig()
    excluded = excluded_nodes(store, policy, datetime.now(UTC))
    for node, failures in known.items():
        left_out = f"left out ({policy.failures} or more in {policy.window_hours:g} hours)" if node in excluded else "in use"
        print(f"{node:<24} {len(failures)} failures, {left_out}")
        for failure in failures:
            print(f"  {failure.at:%Y-%m-%d %H:%M}  {failure.run_id} leg {failure.leg}: {failure.reason}")
    return 0


def _say_what_jobs_do(console: "Console", run: "RunRef") -> None:
    from tasks.legs import describe_jobs

    for job in describe_jobs(run):
        console.print(f"queue    {job}", highlight=False)


def chaos_command(options: argparse.Namespace) -> int:
    from flows.prefect_server import prefect_api
    from roll_core.config.load import load_config
    from tests.chaos.kill_points import matrix_table, points_table, sentence, trouble

    config = load_config(options.config, options.overrides)
    with prefect_api(Path(config.work_dir)):
        from tests.chaos.flow import chaos

        broken = chaos(options.config, options.overrides, options.kills, options.per_run, options.seed).broken
    recoveries = [recovery for run in broken for recovery in run.recoveries]
    print(matrix_table(recoveries), points_table(recoveries), sep="\n\n", end="\n\n")
    for line in trouble(broken):
        print(line)
    print(sentence(broken))
    return DIFFERENT if trouble(broken) else 0


def nightly_command(options: argparse.Namespace) -> int:
    from flows.prefect_server import prefect_api
    from roll_core.config.load import load_config, load_nightly
    from roll_core.reporting.regression import sentence
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
            print(sentence(verdict))
    return 0


def _accept(run_id: str, configs: "list[RunConfig]") -> int:
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.runs import find_run
    from tasks.nightly import open_baselines

    name = run_id.rpartition("-")[0]
    config = next((config for config in configs if config.name == name), None)
    if config is None:
        known = ", ".join(config.name for config in configs)
        raise UserError(f"--accept: {run_id} is no run of a reference; they are runs of: {known}")
    open_baselines(config).begin_anew(find_run(ObjectStore(config.store.uri), run_id, "--accept"))
    print(f"{run_id} is accepted; later runs of {name} are compared with it and with what follows it")
    return 0


def up_command(options: argparse.Namespace) -> int:
    from flows.up import bring_up

    return bring_up(options.prefect_port, options.mlflow_port, options.tracking)


def _follow(config: "RunConfig", store_uri: str, flow_name: str, parameters: dict[str, object]) -> int:
    """Run a flow of `flows.rlvr` in this process and draw what it does."""
    from httpx import TransportError
    from rich.console import Console

    from flows.cli.progress_view import showing
    from flows.prefect_server import leave_soon, prefect_api
    from roll_core.store.records.runs import summary_of_finished

    console = Console()
    with showing(config, console) as view:
        try:
            with prefect_api(Path(config.work_dir)):
                from flows import rlvr

                flow = {"rlvr": rlvr.rlvr, "rlvr_resume": rlvr.rlvr_resume, "rlvr_fork": rlvr.rlvr_fork}[flow_name]
                summary = flow(**parameters)
        except KeyboardInterrupt:
            view.progress.stop()
            how = (
                f"resume it with: roll resume {view.run.run_id}{_store_option(store_uri)}"
                if view.run
                else "nothing had begun"
            )
            console.print(f"stopped; what was committed is safe; {how}", highlight=False)
            return INTERRUPTED
        except RollError as error:
            view.progress.stop()
            how = f"; resume it with: roll resume {view.run.run_id}{_store_option(store_uri)}" if view.run else ""
            print(f"roll: {error}{how}", file=sys.stderr)
            leave_soon(error.exit_code)
            return error.exit_code
        except TransportError as error:
            # Of Prefect's client: the flow's end could not be told. What counts is in the store.
            view.progress.stop()
            if view.run is None or (summary := summary_of_finished(view.run)) is None:
                how = f"; resume it with: roll resume {view.run.run_id}{_store_option(store_uri)}" if view.run else ""
                print(f"roll: the Prefect server cannot be reached ({error}){how}", file=sys.stderr)
                leave_soon(1)
                return 1
    assert view.run is not None
    _say_where_to_look(console, view.run, config, summary)
    leave_soon(0)
    return 0


def _store_option(store_uri: str) -> str:
    from roll_core.config.load import absolute_uri

    return "" if store_uri == absolute_uri(DEFAULT_STORE) else f" --store {store_uri}"


def _say_where_to_look(console: "Console", run: "RunRef", config: "RunConfig", summary: "RunSummary") -> None:
    from flows.cli.progress_view import curve

    report = Path(config.work_dir) / run.run_id / "report.html"
    mlflow = f"mlflow ui --backend-store-uri {config.tracking.uri}"
    if not config.tracking.uri.startswith("sqlite:"):
        mlflow = config.tracking.uri
    rows = {
        "run": run.run_id,
        "store": f"{run.store_uri}/runs/{run.run_id}",
        "mlflow": mlflow,
        "report": str(report) if report.exists() else "",
        "export": _how_to_export(run, config),
        "curve": curve(summary.curve) if summary.curve else "",
    }
    for label, text in rows.items():
        if text:
            console.print(f"{label:<8} {text}", highlight=False, soft_wrap=True)
    if summary.curve:
        console.print(summary.sentence, highlight=False)


def _how_to_export(run: "RunRef", config: "RunConfig") -> str:
    """Exports that are in the store, the newest of them, and the command that has it."""
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.exports import read_exports

    exports = read_exports(ObjectStore(run.store_uri, config.store.retry_seconds), run.run_id)
    if not exports:
        return ""
    return f"roll export {run.run_id}@{exports[-1].iteration} FOLDER{_store_option(run.store_uri)}"


if __name__ == "__main__":
    sys.exit(main())
