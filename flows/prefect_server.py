"""Which Prefect a command talks to: the one PREFECT_API_URL names, or an embedded one that lives as long as it does."""

import contextlib
import functools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from roll_core.errors import DeadlineExceeded
from roll_core.host import end_with_parent, free_port

START_DEADLINE_S = 120.0
"""The first start creates and migrates a database, which took up to a minute on a loaded two-core machine."""

QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "PREFECT_LOGGING_LEVEL": "CRITICAL"}
"""The command says itself what went wrong; an embedded server has no page on which to read logs."""


_PATIENCE = {"PREFECT_CLIENT_MAX_RETRIES": "3"}
"""A flow needs its server when it begins and when it ends, and waits for it for about 15 s each time (Prefect's own default
is a minute). Nothing in between does."""
FAREWELL_SECONDS = 10.0
"""At the end of a process Prefect delivers the events it has left, for minutes if nobody takes them."""


def leave_soon(exit_code: int) -> None:
    """End this process soon if there is nobody to take Prefect's last events: to be called when all is done that matters."""
    url = os.environ.get("PREFECT_API_URL")
    if url is not None and answers(url):
        return
    farewell = threading.Timer(FAREWELL_SECONDS, os._exit, [exit_code])
    farewell.daemon = True
    farewell.start()


_COMPLETE_DATABASE = {"PREFECT_API_DATABASE_MIGRATE_ON_START": "false", "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
"""A copy of a database that a server of the same version has made needs neither: one to two seconds of a processor."""

EMBEDDED = "ROLL_EMBEDDED_PREFECT"
"""Set, beside PREFECT_API_URL, while that is the address of an embedded server."""


def is_embedded() -> bool:
    """Whether the Prefect server in use is one that only this machine reaches, and that ends with a command."""
    return EMBEDDED in os.environ


@contextlib.contextmanager
def prefect_api(log_dir: Path) -> Iterator[str]:
    """The address of a running Prefect API, exported so that legs report to the same one."""
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    given = os.environ.get("PREFECT_API_URL")
    if given:
        yield given
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with embedded_server(log_dir, dict(os.environ)) as url:
        os.environ |= {"PREFECT_API_URL": url, EMBEDDED: "1"}
        try:
            yield url
        finally:
            del os.environ["PREFECT_API_URL"], os.environ[EMBEDDED]


@contextlib.contextmanager
def own_api(log_dir: Path, home: Path, template: Path) -> Iterator[Callable[[], None]]:
    """A Prefect server for this process alone, of which nothing is left: for a leg on a node that reaches no other.

    It is on its way when the block begins, for Prefect to be imported meanwhile; call what the block is given before the
    server is needed. What takes longest is the first start, which makes the database: `template`, on a disk that other legs
    share, keeps one.
    """
    assert "prefect" not in sys.modules, "Prefect reads its settings when it is imported"
    database = home / "prefect.db"
    environment = os.environ | QUIET | {"PREFECT_HOME": str(home)}
    if is_warm := template.exists():
        shutil.copyfile(template, database)
        environment |= _COMPLETE_DATABASE
    with _starting_server(log_dir, environment) as (url, wait_until_up):
        os.environ["PREFECT_API_URL"] = url

        def wait() -> None:
            wait_until_up()
            if not is_warm:
                _copy_database(database, template)

        yield wait


def _copy_database(database: Path, copy: Path) -> None:
    """Of a database in use; appears whole."""
    draft = copy.with_name(f"{copy.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.closing(sqlite3.connect(database)) as source, contextlib.closing(sqlite3.connect(draft)) as target:
        source.backup(target)
    draft.replace(copy)


@contextlib.contextmanager
def embedded_server(log_dir: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a Prefect server of our own, that lives as long as the block."""
    with _starting_server(log_dir, environment) as (url, wait_until_up):
        wait_until_up()
        yield url


@contextlib.contextmanager
def _starting_server(log_dir: Path, environment: dict[str, str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The same, on its way: its address, and how to wait until it answers there."""
    port = free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    log_file = log_dir / "prefect-server.log"
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    # Prefect's own settings for a server that lives as long as a command: no page, no schedules.
    environment |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    with background_process(command, environment, log_file) as server:
        url = f"http://127.0.0.1:{port}/api"
        yield url, functools.partial(wait_until_healthy, server, url, log_file)


@contextlib.contextmanager
def background_process(command: list[str], environment: dict[str, str], log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A service for as long as the block lasts.

    It has a session of its own, so that Ctrl-C reaches it last, and is tied to this process: kill -9 leaves no orphan.
    """
    with open(log_file, "ab") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
    ends_at = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < ends_at and server.poll() is None:
        if answers(url):
            return
        time.sleep(0.1)
    raise DeadlineExceeded(f"the embedded Prefect server did not start; its log is {log_file}")


def answers(url: str) -> bool:
    """Whether a server is up."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False
