"""Prefect's view of a run after its processes died: a lock per flow run, and Crashed for flow runs whose lock is free.

A process that is killed cannot report its end, and Prefect would show its flow run as running for ever. Therefore every flow
run of a run holds a lock file, `work_dir/RUN/flow-runs/FLOW_RUN_ID`. The kernel frees a lock when its holder dies, on any
machine that shares the disk, so that a free lock proves the death and a live flow run is never touched.
"""

import contextlib
import fcntl
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

FOLDER = "flow-runs"
"""Folder of the lock files, within a run's folder."""
MESSAGE = "Its process ended without reporting."
POLL_S = 0.1

log = logging.getLogger(__name__)

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_held: dict[str, tuple[Path, IO[bytes]]] = {}
"""Lock files of this process and their open descriptors, by flow run id."""


def hold_flow_run(run_dir: Path) -> None:
    """Hold the lock of the flow run in progress, until `release_flow_run` or the end of this process."""
    import prefect.runtime

    flow_run_id = str(prefect.runtime.flow_run.id)
    path = run_dir / FOLDER / flow_run_id
    draft = path.with_name(f"{flow_run_id}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(draft, "wb")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(draft, path)  # locked before it has its name, so that no look takes it for the lock of a dead process
        _held[flow_run_id] = path, lock
    except OSError as error:
        log.warning("Prefect will show this flow run as running if its process is killed: %s", error)


def release_flow_run(_flow: object, flow_run: "FlowRun", _state: object) -> None:
    """Release and remove the lock of a flow run whose final state Prefect has. A hook of the flows."""
    if str(flow_run.id) in _held:
        path, lock = _held.pop(str(flow_run.id))
        with contextlib.suppress(OSError), lock:
            path.unlink()


ON_END: dict[str, Any] = {
    f"on_{ending}": [release_flow_run] for ending in ("completion", "failure", "crashed", "cancellation")
}
"""Options of a flow that calls `hold_flow_run`."""


def crash_dead_flow_runs(folder: Path, wait_s: float = 0.0) -> None:
    """Tell Prefect that the flow runs below a folder have crashed whose process is dead. Never raises.

    `folder` is a work folder or the folder of one run. Locks that other processes hold are waited for, `wait_s` at most.
    """
    try:
        ends_at = time.monotonic() + wait_s
        while not _crash_dead(folder) and time.monotonic() < ends_at:
            time.sleep(POLL_S)
    except Exception as error:
        log.warning("Prefect may show flow runs of dead processes as running: %s", error)


def crash_dead_if_served(work_dirs: set[str]) -> None:
    """Do the same for several work folders, if PREFECT_API_URL names a server that replies. For commands that need none."""
    from flows.prefect_server import is_healthy

    url = os.environ.get("PREFECT_API_URL")
    dead = [folder for folder in work_dirs if any(map(_is_free, _locks(Path(folder))))]
    if url and dead and is_healthy(url):
        for folder in dead:
            crash_dead_flow_runs(Path(folder))


def _crash_dead(folder: Path) -> bool:
    """Crash the flow runs of dead processes once. Return whether no other process holds a lock there."""
    paths = list(_locks(folder))
    free = list(filter(_is_free, paths))
    if free:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            for path in free:
                _crash(path, client)
    return len(free) == len(paths)


def _locks(folder: Path) -> Iterator[Path]:
    """Lock files of other processes, or of dead ones, below a work folder or a run's folder."""
    for pattern in (f"{FOLDER}/*", f"*/{FOLDER}/*"):
        for path in folder.glob(pattern):
            if _UUID.fullmatch(path.name) and path.name not in _held:
                yield path


def _is_free(path: Path) -> bool:
    """True if no process holds a lock file. False if that cannot be known, as on a disk without locks."""
    try:
        with open(path, "r+b") as lock:  # NFS locks only files that are open for writing
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _crash(path: Path, client: "SyncPrefectClient") -> None:
    """Set the flow run of a free lock to Crashed if it is running, and remove the lock file."""
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    try:
        state = client.read_flow_run(uuid.UUID(path.name)).state
    except ObjectNotFound:
        return  # of another server: the lock stays for a look that can reach it
    if state is not None and (state.is_running() or state.is_pending() or state.is_cancelling()):
        client.set_flow_run_state(path.name, Crashed(message=MESSAGE), force=True)
    path.unlink(missing_ok=True)
