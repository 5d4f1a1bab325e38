"""The chaos matrix: every process of a run killed at every stage, and every service around it failing.

    python -m tests.chaos.report [--short] [--kills 56] [--per-run 5] [--seed 0] [--output docs/chaos.md]

Breaks real runs of ten iterations of a tiny model: SIGKILL by `roll chaos`, then a store on a real S3 server behind a proxy
that misbehaves, an S3 server, an MLflow server and a Prefect server that are killed and come back, or do not. Each finished
run is compared with an unbroken one: weights, rollouts and metrics of every iteration, to the bit. Prints the tables and
writes them to --output. Exits with 1 if anything committed was lost, anything differs, or a command had no sentence for it.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import fsspec

from flows.prefect_server import background_process, free_port, prefect_api, wait_until_healthy
from roll_core.config.load import load_config
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import open_run
from roll_core.tracking.spool import Spool
from roll_core.types.refs import RunRef
from tests.chaos.kill_points import (
    VICTIMS,
    BrokenRun,
    KillPoint,
    Outcome,
    matrix_table,
    points_table,
    sentence,
    trouble,
)
from tests.faulty_proxy import Fault as StoreFault
from tests.faulty_proxy import FaultyProxy
from tests.s3_server import S3Server

ROOT = Path(__file__).resolve().parents[1]
CONFIG = f"""
extends: {ROOT}/configs/clusters/laptop.yaml
name: chaos
iterations: 10
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
CELLS = 8 * len(VICTIMS)
"""Of the stages, all but update_critic: this model has none."""
SHORT_KILLS = 3
FAULT_SECONDS = 3.0
"""How long a service misbehaves: many times as long as an iteration of this model."""
STORE_FAULTS = {
    "store refuses": StoreFault.DISCONNECT,
    "store hangs": StoreFault.HANG,
    "store answers 500": StoreFault.ERROR_500,
    "store truncates": StoreFault.TRUNCATE,
    "store is slow": StoreFault.SLOW,
}
PLACES = (("collect", 2), ("checkpoint", 4), ("commit", 7))
"""Where services fail: rollouts, checkpoint files and a manifest are on their way."""
# Prefect reads its settings when it is imported, so functions here import `tasks` once there is a server.

HANG_SECONDS = 4.0
"""An attempt is given up after a fifth of `store.retry_seconds`."""


@dataclass(frozen=True)
class Break:
    """Something done to a service when a stage begins, and undone; both answer when they have taken effect."""

    point: KillPoint
    do: Callable[[], None]
    undo: Callable[[], None]


def open_trial(config: Path, point: KillPoint, *overrides: str) -> RunRef:
    """A run of its own name: runs of several stores share one scratch folder here."""
    resolved = load_config(str(config), [f"name={point.victim.replace(' ', '-')}", *overrides])
    return open_run(ObjectStore(resolved.store.uri), resolved)


def endure(run: RunRef, breaks: list[Break], unbroken: RunRef) -> BrokenRun:
    """A run that must get through everything in one command."""
    from tests.chaos.breaking import command, fault_of, judge, last_words, wait_for_end, wait_for_stage

    faults, since = [], datetime.now(UTC)
    with command(run) as process:
        for broken in breaks:
            if not wait_for_stage(run, process, broken.point, since):
                break
            at = datetime.now(UTC)
            broken.do()
            time.sleep(FAULT_SECONDS)
            broken.undo()
            faults.append(fault_of(run, process, broken.point, at, ()))
        problems = wait_for_end(run, process)
    if process.returncode:
        problems = (*problems, f"the command ended with {process.returncode}: {last_words(run)}")
    return with_trouble(judge(run, faults, [b.point for b in breaks[len(faults) :]], unbroken), problems)


def go_without(run: RunRef, broken: Break, ends_with: int, unbroken: RunRef) -> BrokenRun:
    """A run that loses a service until its command has ended: with an exit code and, if that is an error, a sentence."""
    from tests.chaos.breaking import command, fault_of, finish, judge, last_words, wait_for_end, wait_for_stage

    with command(run) as process:
        met = wait_for_stage(run, process, broken.point, datetime.now(UTC))
        at = datetime.now(UTC)
        broken.do()
        problems = wait_for_end(run, process)
    broken.undo()
    said = last_words(run)
    if process.returncode != ends_with or (ends_with and not said.startswith("roll: ")):
        problems = (*problems, f"the command ended with {process.returncode} and said: {said[:200]}")
    faults = [fault_of(run, process, broken.point, at, problems)] if met else []
    if process.returncode:
        finish(run)
    return judge(run, faults, [] if met else [broken.point], unbroken)


def with_trouble(judged: BrokenRun, problems: tuple[str, ...]) -> BrokenRun:
    if not problems:
        return judged
    *before, last = judged.recoveries
    blamed = last.model_copy(update={"differences": (*problems, *last.differences)})
    return judged.model_copy(update={"recoveries": (*before, blamed)})


def break_the_store(config: Path, folder: Path, unbroken: RunRef, faults: dict[str, StoreFault]) -> Iterator[BrokenRun]:
    with S3Server(folder / "s3") as server, FaultyProxy(server.port) as proxy:
        through_proxy = server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}

        def misbehave(fault: StoreFault | None) -> Callable[[], None]:
            return lambda: setattr(proxy, "fault_of", lambda _method, _path: fault)

        def on_s3(*overrides: str) -> tuple[str, ...]:
            return (f"store.uri={server.new_store_uri()}", *overrides)

        with environment(through_proxy):
            for name, fault in faults.items():
                breaks = [Break(at(name, *place), misbehave(fault), misbehave(None)) for place in PLACES]
                run = open_trial(config, breaks[0].point, *on_s3(f"store.retry_seconds={5 * HANG_SECONDS}"))
                yield endure(run, breaks, unbroken)
            gone = Break(at("store stays away", "commit", 5), misbehave(StoreFault.DISCONNECT), misbehave(None))
            run = open_trial(config, gone.point, *on_s3("store.retry_seconds=3"))
            yield go_without(run, gone, 1, unbroken)
        with environment(server.environment):
            killed = [Break(at("S3 server killed", *place), server.kill, server.start) for place in PLACES]
            yield endure(open_trial(config, killed[0].point, *on_s3()), killed, unbroken)


def break_mlflow(config: Path, folder: Path, unbroken: RunRef) -> Iterator[BrokenRun]:
    from tests.chaos.breaking import folder_of

    port = free_port()
    server = Service(lambda: mlflow_server(folder, port))
    tracking = f"tracking.uri=http://127.0.0.1:{port}"
    with server:
        back = Break(at("MLflow comes back", "collect", 3), server.stop, server.start)
        run = open_trial(config, back.point, tracking, "tracking.drain_seconds=60")
        yield with_trouble(endure(run, [back], unbroken), events_left(folder_of(run)))
        gone = Break(at("MLflow stays away", "collect", 3), server.stop, server.start)
        run = open_trial(config, gone.point, tracking)
        judged = go_without(run, gone, 0, unbroken)
        upload = [sys.executable, "-m", "roll_core.tracking.uploader", str(folder_of(run) / "tracking"), "--once"]
        subprocess.run(upload, check=False)
        yield with_trouble(judged, events_left(folder_of(run)))


def events_left(run_folder: Path) -> tuple[str, ...]:
    left = Spool(run_folder / "tracking").count_left()
    return (f"{left} events did not reach MLflow",) if left else ()


def break_prefect(config: Path, folder: Path, unbroken: RunRef) -> Iterator[BrokenRun]:
    port = free_port()
    server = Service(lambda: prefect_server(folder, port))
    with server, environment({"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}):
        back = Break(at("Prefect comes back", "collect", 3), server.stop, server.start)
        yield endure(open_trial(config, back.point), [back], unbroken)
        gone = Break(at("Prefect stays away", "collect", 3), server.stop, server.start)
        yield go_without(open_trial(config, gone.point), gone, 0, unbroken)


def at(service: str, stage: str, iteration: int) -> KillPoint:
    return KillPoint(victim=service, stage=stage, iteration=iteration, delay_s=0.0)


class Service:
    """A server that can be stopped and started again; SIGKILL, as everything here."""

    def __init__(self, run: Callable[[], AbstractContextManager[object]]):
        self._run = run
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        self._stack.enter_context(self._run())

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    settings = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with killed_process(command, settings, folder / "mlflow-server.log") as server:
        wait_until_healthy(server, f"http://127.0.0.1:{port}", folder / "mlflow-server.log")
        yield


@contextlib.contextmanager
def prefect_server(folder: Path, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    settings = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    with killed_process(command, settings, folder / "prefect-server.log") as server:
        wait_until_healthy(server, f"http://127.0.0.1:{port}/api", folder / "prefect-server.log")
        yield


@contextlib.contextmanager
def killed_process(command: list[str], settings: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A background process whose whole group is killed where others are asked to end."""
    with background_process(command, settings, log) as server:
        try:
            yield server
        finally:
            os.killpg(server.pid, 9)


@contextlib.contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """What commands started in this block see. s3fs keeps connections by its own arguments and must forget them."""
    before = dict(os.environ)
    os.environ.update(settings)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def page(outcome: Outcome, services: list[BrokenRun], minutes: float) -> str:
    kills = [recovery for run in outcome.broken for recovery in run.recoveries]
    faults = [recovery for run in services for recovery in run.recoveries]
    broken = [*outcome.broken, *services]
    collects, needed = sum(run.num_collects for run in broken), 10 * len(broken)
    again = sum(len(run.generated_again) for run in broken)
    return f"""# Chaos

Written by `make chaos` in {minutes:.0f} minutes on {os.cpu_count()} cores. Real runs of ten iterations of a tiny model are
broken on purpose, resumed, and compared with an unbroken run: the digest of the weights, the rollouts (token ids, logprobs,
scores) and every metric that is not a time, of every iteration, to the bit.

`ok 12 s` means: nothing that was committed was lost, nothing differs, the command ended with one sentence, and 12 s after
the fault the leg that took over had committed. `survived 2 s` means the same without a resume: the command went on, and an
iteration that began after the fault was committed within 2 s. An iteration of this model takes a fraction of a second: the
seconds are those of a leg's end and start, or of a successor's start, not of work done again.

## Processes killed with SIGKILL

{sentence(outcome.broken)}.

{matrix_table(kills)}

A cell is one kill, as the stage began or inside it. A leg goes on until it needs whoever died: for an engine or a reward
worker it starts a successor, at the death of anybody else it ends.

## Services that fail

A fault begins with the stage and lasts {FAULT_SECONDS:.0f} s or more. A store that stays away does so for longer than
`store.retry_seconds`: the command ends with one sentence, and the run is resumed later. MLflow and Prefect, where they stay
away, do so until the run has ended.

{matrix_table(faults)}

## Generation

Collects that began, in all broken runs: {collects}, for {needed} iterations; the rest belong to iterations that a kill undid
before their rollouts were kept. Collects of iterations already committed: {again}.

## Every fault

{points_table([*kills, *faults])}

## What was not as it should be

{chr(10).join(f"- {line}" for line in trouble(broken)) or "Nothing."}
"""


def break_everything(options: argparse.Namespace, folder: Path) -> tuple[Outcome, list[BrokenRun]]:
    config = folder / "chaos.yaml"
    config.write_text(CONFIG)
    parts = set(options.only.split(",")) if options.only else {"kills", "store", "mlflow", "prefect"}
    kills = SHORT_KILLS if options.short or "kills" not in parts else options.kills
    store_faults = dict(list(STORE_FAULTS.items())[:1]) if options.short else STORE_FAULTS
    with prefect_api(folder):
        from tests.chaos.flow import chaos

        outcome = chaos(str(config), [], kills if "kills" in parts else 0, options.per_run, options.seed)
        print(sentence(outcome.broken), flush=True)
        services = []
        for part, broken in {
            "store": break_the_store(config, folder, outcome.unbroken, store_faults),
            "mlflow": break_mlflow(config, folder, outcome.unbroken),
            "prefect": break_prefect(config, folder, outcome.unbroken),
        }.items():
            for run in broken if part in parts else ():
                print(*(f"{r.point.victim}, {r.point.begins_as}: {r.verdict}" for r in run.recoveries), sep="\n", flush=True)
                services.append(run)
    return outcome, services


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few cells of each kind")
    parser.add_argument("--only", default="", help="some of kills,store,mlflow,prefect")
    parser.add_argument("--kills", type=int, default=CELLS)
    parser.add_argument("--per-run", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where the page goes (default: printed only)")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, contextlib.chdir(folder):
        outcome, services = break_everything(options, Path(folder))
    text = page(outcome, services, (time.monotonic() - begun) / 60)
    print(text)
    if options.output:
        options.output.write_text(text)
    sys.exit(1 if trouble([*outcome.broken, *services]) else 0)


if __name__ == "__main__":
    main()
