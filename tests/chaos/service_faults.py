"""Make the services around a run fail: an S3 store behind a faulty proxy, an S3, an MLflow and a Prefect server.

A service fails for some seconds and comes back, or stays away until the command has ended. Each run is then compared with an
unbroken one. Import this module when a Prefect server is up: Prefect reads its settings on import.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import fsspec

from flows.prefect_server import background_process, free_port, wait_until_healthy
from roll_core.config.load import load_config
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import open_run
from roll_core.tracking.spool import Spool
from roll_core.types.refs import RunRef
from tests.chaos.kill_points import KillPoint
from tests.chaos.outcomes import BrokenRun
from tests.chaos.process_kills import (
    command,
    compare_with_unbroken,
    finish,
    last_log_line,
    record_fault,
    wait_for_exit,
    wait_for_stage,
    work_folder,
)
from tests.faulty_proxy import Fault as ProxyFault
from tests.faulty_proxy import FaultyProxy
from tests.s3_server import S3Server
from tests.support import QUIET_MLFLOW

FAULT_SECONDS = 3.0
"""Seconds that a temporary fault lasts: many iterations of the tiny model."""
STORE_FAULTS = {
    "store refuses": ProxyFault.DISCONNECT,
    "store hangs": ProxyFault.HANG,
    "store answers 500": ProxyFault.ERROR_500,
    "store truncates": ProxyFault.TRUNCATE,
    "store is slow": ProxyFault.SLOW,
}
FAULTY_STAGES = (("collect", 2), ("checkpoint", 4), ("commit", 7))
"""Stages, with iterations, at whose begin a service fails: rollouts, checkpoint files or a manifest are being stored."""
HANG_SECONDS = 4.0
"""Seconds after which a request that hangs is given up: a fifth of `store.retry_seconds`."""


@dataclass(frozen=True)
class ServiceFault:
    """Fault of a service at a kill point; `inject` and `repair` return once they have taken effect."""

    point: KillPoint
    inject: Callable[[], None]
    repair: Callable[[], None]


def _point(service: str, stage: str, iteration: int) -> KillPoint:
    return KillPoint(victim=service, stage=stage, iteration=iteration, delay_s=0.0)


def _open_trial(config: Path, point: KillPoint, *overrides: str) -> RunRef:
    """Open a run named after the faulty service: runs of several stores share one work folder here."""
    resolved = load_config(str(config), [f"name={point.victim.replace(' ', '-')}", *overrides])
    return open_run(ObjectStore(resolved.store.uri), resolved)


def _run_through(run: RunRef, service_faults: list[ServiceFault], unbroken: RunRef) -> BrokenRun:
    """Finish a run in one command, which must survive temporary faults of a service."""
    faults, since = [], datetime.now(UTC)
    with command(run) as process:
        for fault in service_faults:
            if not wait_for_stage(run, process, fault.point, since):
                break
            at = datetime.now(UTC)
            fault.inject()
            time.sleep(FAULT_SECONDS)
            fault.repair()
            faults.append(record_fault(run, process, fault.point, at, ()))
        defects = wait_for_exit(run, process)
    if process.returncode:
        defects = (*defects, f"the command ended with {process.returncode}: {last_log_line(run)}")
    missed = [fault.point for fault in service_faults[len(faults) :]]
    return _with_defects(compare_with_unbroken(run, faults, missed, unbroken), defects)


def _run_without(run: RunRef, fault: ServiceFault, exit_code: int, unbroken: RunRef) -> BrokenRun:
    """Run a command whose service stays away until the command has ended, then finish the run.

    The command must end with `exit_code` and, if that is an error, with one sentence.
    """
    with command(run) as process:
        is_met = wait_for_stage(run, process, fault.point, datetime.now(UTC))
        at = datetime.now(UTC)
        fault.inject()
        defects = wait_for_exit(run, process)
    fault.repair()
    line = last_log_line(run)
    if process.returncode != exit_code or (exit_code and not line.startswith("roll: ")):
        defects = (*defects, f"the command ended with {process.returncode} and said: {line[:200]}")
    faults = [record_fault(run, process, fault.point, at, defects)] if is_met else []
    if process.returncode:
        finish(run)
    return compare_with_unbroken(run, faults, [] if is_met else [fault.point], unbroken)


def _with_defects(broken: BrokenRun, defects: tuple[str, ...]) -> BrokenRun:
    """Copy of an outcome whose last recovery has further defects."""
    if not defects:
        return broken
    *before, last = broken.recoveries
    blamed = last.model_copy(update={"differences": (*defects, *last.differences)})
    return broken.model_copy(update={"recoveries": (*before, blamed)})


def break_store(config: Path, folder: Path, unbroken: RunRef, faults: dict[str, ProxyFault]) -> Iterator[BrokenRun]:
    """Run a config on an S3 store that fails in each of some ways, that stays away, and whose server is killed."""
    with S3Server(folder / "s3") as server, FaultyProxy(server.port) as proxy:
        through_proxy = server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}

        def set_fault(fault: ProxyFault | None) -> Callable[[], None]:
            return lambda: setattr(proxy, "fault_of", lambda _method, _path: fault)

        def on_s3(*overrides: str) -> tuple[str, ...]:
            return (f"store.uri={server.new_store_uri()}", *overrides)

        with _environment(through_proxy):
            for name, fault in faults.items():
                passing = [ServiceFault(_point(name, *stage), set_fault(fault), set_fault(None)) for stage in FAULTY_STAGES]
                run = _open_trial(config, passing[0].point, *on_s3(f"store.retry_seconds={5 * HANG_SECONDS}"))
                yield _run_through(run, passing, unbroken)
            point = _point("store stays away", "commit", 5)
            lasting = ServiceFault(point, set_fault(ProxyFault.DISCONNECT), set_fault(None))
            run = _open_trial(config, point, *on_s3("store.retry_seconds=3"))
            yield _run_without(run, lasting, 1, unbroken)
        with _environment(server.environment):
            killed = [ServiceFault(_point("S3 server killed", *stage), server.kill, server.start) for stage in FAULTY_STAGES]
            yield _run_through(_open_trial(config, killed[0].point, *on_s3()), killed, unbroken)


def break_mlflow(config: Path, folder: Path, unbroken: RunRef) -> Iterator[BrokenRun]:
    """Run a config whose MLflow server is killed, and comes back or stays away; all events must arrive in the end."""
    port = free_port()
    server = RestartableServer(lambda: _mlflow_server(folder, port))
    tracking = f"tracking.uri=http://127.0.0.1:{port}"
    with server:
        passing = ServiceFault(_point("MLflow comes back", "collect", 3), server.stop, server.start)
        run = _open_trial(config, passing.point, tracking, "tracking.drain_seconds=60")
        yield _with_defects(_run_through(run, [passing], unbroken), _undelivered_events(work_folder(run)))
        lasting = ServiceFault(_point("MLflow stays away", "collect", 3), server.stop, server.start)
        run = _open_trial(config, lasting.point, tracking)
        broken = _run_without(run, lasting, 0, unbroken)
        upload = [sys.executable, "-m", "roll_core.tracking.uploader", str(work_folder(run) / "tracking"), "--once"]
        subprocess.run(upload, check=False)
        yield _with_defects(broken, _undelivered_events(work_folder(run)))


def _undelivered_events(folder: Path) -> tuple[str, ...]:
    left = Spool(folder / "tracking").count_left()
    return (f"{left} events did not reach MLflow",) if left else ()


def break_prefect(config: Path, folder: Path, unbroken: RunRef) -> Iterator[BrokenRun]:
    """Run a config whose Prefect server is killed, and comes back or stays away."""
    port = free_port()
    server = RestartableServer(lambda: _prefect_server(folder, port))
    with server, _environment({"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}):
        passing = ServiceFault(_point("Prefect comes back", "collect", 3), server.stop, server.start)
        yield _run_through(_open_trial(config, passing.point), [passing], unbroken)
        lasting = ServiceFault(_point("Prefect stays away", "collect", 3), server.stop, server.start)
        yield _run_without(_open_trial(config, lasting.point), lasting, 0, unbroken)


class RestartableServer:
    """Server that can be stopped and started again; given as a context manager that keeps it running."""

    def __init__(self, running: Callable[[], AbstractContextManager[object]]):
        self._running = running
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        self._stack.enter_context(self._running())

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> "RestartableServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def _mlflow_server(folder: Path, port: int) -> Iterator[None]:
    arguments = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    settings = os.environ | QUIET_MLFLOW
    with _killed_process(arguments, settings, folder / "mlflow-server.log") as server:
        wait_until_healthy(server, f"http://127.0.0.1:{port}", folder / "mlflow-server.log")
        yield


@contextlib.contextmanager
def _prefect_server(folder: Path, port: int) -> Iterator[None]:
    arguments = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    settings = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    with _killed_process(arguments, settings, folder / "prefect-server.log") as server:
        wait_until_healthy(server, f"http://127.0.0.1:{port}/api", folder / "prefect-server.log")
        yield


@contextlib.contextmanager
def _killed_process(arguments: list[str], settings: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Background process whose process group gets SIGKILL, not SIGTERM, at the end of the block."""
    with background_process(arguments, settings, log) as server:
        try:
            yield server
        finally:
            os.killpg(server.pid, 9)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the block and the commands it starts.

    Clears the instances of s3fs, which are cached by their arguments and would keep the old settings.
    """
    before = dict(os.environ)
    os.environ.update(settings)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
