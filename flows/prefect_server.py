"""Choice and start of the Prefect server that a command or a leg uses.

PREFECT_API_URL names an existing server. Without it, a command starts an embedded server that lives as long as the command.
"""

import contextlib
import functools
import http.client
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from roll_core.errors import DeadlineExceeded, PrefectUnavailable, UserError, one_line, shorten
from roll_core.host import end_with_parent, free_port

START_DEADLINE_S = 120.0
"""Seconds that a server may take to start. The first start creates and migrates a database, which took up to a minute on a
loaded two-core machine."""

QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "PREFECT_LOGGING_LEVEL": "CRITICAL"}
"""Environment of an embedded server: no telemetry, no logging. The command itself reports errors, and the server has no UI
that would show logs."""


RESPONSE_S = 10.0
"""Seconds that the server of PREFECT_API_URL has to respond before anything starts."""
SHUTDOWN_S = 10.0
"""Seconds that Prefect has to deliver its last events when a process ends. Without a server it would try for minutes."""


def exit_soon(exit_code: int) -> None:
    """Exit within SHUTDOWN_S if no Prefect server is reachable for Prefect's last events. Call it when all work is done."""
    url = os.environ.get("PREFECT_API_URL")
    if url is not None and is_healthy(url):
        return
    timer = threading.Timer(SHUTDOWN_S, os._exit, [exit_code])
    timer.daemon = True
    timer.start()


SKIP_DATABASE_SETUP = {"PREFECT_API_DATABASE_MIGRATE_ON_START": "false", "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
"""Environment that skips migration and block registration, which take one to two CPU seconds. For a copy of a database that
a server of the same version has created."""

EMBEDDED_VARIABLE = "ROLL_EMBEDDED_PREFECT"
"""Environment variable that is set while PREFECT_API_URL is the address of an embedded server."""


def is_embedded() -> bool:
    """True if the Prefect server in use is embedded: reachable from this machine only, and ending with the command."""
    return EMBEDDED_VARIABLE in os.environ


@contextlib.contextmanager
def prefect_api(log_dir: Path) -> Iterator[str]:
    """Provide the URL of a running Prefect API during the block: that of PREFECT_API_URL, or of an embedded server.

    The URL is exported as PREFECT_API_URL, so legs report to the same server. Prefect's client repeats requests for about a
    minute; then the block raises PrefectUnavailable.
    """
    given = os.environ.get("PREFECT_API_URL")
    if given:
        _check_responds(given)
        with _raising_unavailable():
            yield given
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with embedded_server(log_dir, dict(os.environ)) as url:
        os.environ |= {"PREFECT_API_URL": url, EMBEDDED_VARIABLE: "1"}
        try:
            with _raising_unavailable():
                yield url
        finally:
            del os.environ["PREFECT_API_URL"], os.environ[EMBEDDED_VARIABLE]


@contextlib.contextmanager
def _raising_unavailable() -> Iterator[None]:
    """Raise PrefectUnavailable for what Prefect's client raises about its server."""
    from httpx import HTTPError

    try:
        yield
    except Exception as error:
        cause = next((each for each in (error, error.__cause__) if isinstance(each, HTTPError)), None)
        if cause is None:
            raise
        raise PrefectUnavailable(
            f"the Prefect server does not answer as it should ({shorten(one_line(cause), 160)}): what was committed is "
            "safe; if it stays so, set PREFECT_API_URL to another server"
        ) from error


def _check_responds(url: str) -> None:
    """Raise UserError if nothing responds at PREFECT_API_URL. Any reply of a server will do, a refusal included."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=RESPONSE_S):
            pass
    except urllib.error.HTTPError:
        pass
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"PREFECT_API_URL: no Prefect server responds at {url} ({one_line(error)}): start one, correct the address, or "
            "unset it to have one started"
        ) from None


@contextlib.contextmanager
def private_server(log_dir: Path, home: Path, template: Path) -> Iterator[Callable[[], None]]:
    """Run a temporary Prefect server for this process alone: for a leg on a node that reaches no other server.

    The server is starting when the block begins, so Prefect can be imported meanwhile. The block gets a function that waits
    until the server is up. Creating the database dominates the first start; a copy is kept at `template`, on a disk that all
    legs share, and later legs start from it.
    """
    assert "prefect" not in sys.modules, "Prefect reads its settings when it is imported"
    database = home / "prefect.db"
    environment = os.environ | QUIET | {"PREFECT_HOME": str(home)}
    if has_template := template.exists():
        shutil.copyfile(template, database)
        environment |= SKIP_DATABASE_SETUP
    with _starting_server(log_dir, environment) as (url, wait_until_up):
        os.environ["PREFECT_API_URL"] = url

        def wait() -> None:
            wait_until_up()
            if not has_template:
                copy_database(database, template)

        yield wait


def copy_database(database: Path, copy: Path) -> None:
    """Copy an SQLite database that is in use. The copy appears atomically."""
    draft = copy.with_name(f"{copy.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.closing(sqlite3.connect(database)) as source, contextlib.closing(sqlite3.connect(draft)) as target:
        source.backup(target)
    draft.replace(copy)


@contextlib.contextmanager
def embedded_server(log_dir: Path, environment: dict[str, str]) -> Iterator[str]:
    """Run an embedded Prefect server during the block, and provide its URL once it is up."""
    with _starting_server(log_dir, environment) as (url, wait_until_up):
        wait_until_up()
        yield url


@contextlib.contextmanager
def _starting_server(log_dir: Path, environment: dict[str, str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Run an embedded Prefect server during the block. Yield its URL, and a function that waits until the server is up."""
    port = free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    log_file = log_dir / "prefect-server.log"
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    # Prefect's own settings for an ephemeral server: no UI, no scheduler.
    environment |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    with background_process(command, environment, log_file) as server:
        url = f"http://127.0.0.1:{port}/api"
        yield url, functools.partial(wait_until_healthy, server, url, log_file)


@contextlib.contextmanager
def background_process(command: list[str], environment: dict[str, str], log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a background service during the block, with its output in a log file.

    The service has a session of its own, so Ctrl-C does not reach it. The kernel ends it when this process dies, even by
    SIGKILL.
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
    """Wait until a server that was started responds at its URL; DeadlineExceeded if it ends or takes START_DEADLINE_S."""
    ends_at = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < ends_at and server.poll() is None:
        if is_healthy(url):
            return
        time.sleep(0.1)
    raise DeadlineExceeded(f"the embedded Prefect server did not start; its log is {log_file}")


def is_healthy(url: str) -> bool:
    """True if the Prefect server at a URL is up."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False
