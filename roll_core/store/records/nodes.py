"""Node failures of all runs of a store, one object each: `nodes/NODE/TIME-ID.json`. Launchers exclude nodes by them.

Objects are only created and deleted, never changed, so concurrent writers cannot overwrite each other's entries. Node and
time are in the name, so that finding the excluded nodes takes only listings.
"""

import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, unquote

from roll_core.config.operations.legs import NodesConfig
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.listing import warn_of_strays
from roll_core.store.records.sealed import create_sealed, read_records
from roll_core.types.refs import Record, record_json

FOLDER = "nodes"
RETENTION = timedelta(days=30)
"""Age at which a failure record is deleted; `nodes.window_hours` says how long it counts."""
_TIME = "%Y%m%dT%H%M%S.%fZ"


class NodeFailure(Record):
    """Leg that ended because of a node and not because of the code.

    Example: NodeFailure(node="gpu-017", reason="/tmp has 0.2 GB left", run_id="qwen3-moe-3", leg=4,
    at="2026-11-15T20:30:00Z")
    """

    node: str
    reason: str
    run_id: str
    leg: int
    at: datetime


def record_failure(store: ObjectStore, failure: NodeFailure) -> None:
    """Record a failure against its node, and delete that node's records older than `RETENTION`."""
    name = f"{_folder(failure.node)}/{failure.at.astimezone(UTC).strftime(_TIME)}-{uuid.uuid4().hex[:8]}.json"
    create_sealed(store, name, record_json(failure, indent=1))
    for old, at in _entries(store, failure.node):
        if at < failure.at - RETENTION:
            store.delete(old)


def excluded_nodes(store: ObjectStore, policy: NodesConfig, now: datetime) -> tuple[str, ...]:
    """Nodes that later legs exclude, sorted: `policy.failures` or more failures in the last `policy.window_hours`."""
    since = now - timedelta(hours=policy.window_hours)
    nodes = (unquote(name) for name in store.list(FOLDER))
    counts = {node: sum(since < at <= now for _, at in _entries(store, node)) for node in nodes}
    return tuple(sorted(node for node, count in counts.items() if count >= policy.failures))


def read_failures(store: ObjectStore) -> dict[str, list[NodeFailure]]:
    """Read all recorded failures by node, oldest first."""
    found: dict[str, list[NodeFailure]] = {}
    for folder in store.list(FOLDER):
        names = [name for name, _ in _entries(store, unquote(folder))]
        if failures := [failure for failure in read_records(store, names, NodeFailure) if failure is not None]:
            found[unquote(folder)] = failures
    return found


def clear_failures(store: ObjectStore, nodes: Sequence[str]) -> int:
    """Delete the failures recorded so far against some nodes; returns their number. Failures added meanwhile are kept."""
    names = [name for node in nodes for name, _ in _entries(store, node)]
    for name in names:
        store.delete(name)
    return len(names)


def _entries(store: ObjectStore, node: str) -> Iterator[tuple[str, datetime]]:
    """Yield the record name and time of each failure of a node, oldest first."""
    entries = list(store.list(_folder(node)))
    warn_of_strays(store.uri, _folder(node), tuple(entry for entry in entries if _time_of(entry) is None))
    for entry in entries:
        if (at := _time_of(entry)) is not None:
            yield f"{_folder(node)}/{entry}", at


def _time_of(entry: str) -> datetime | None:
    """Time in the file name of a failure record; None if the name is not that of one."""
    stem, _, rest = entry.partition("-")
    try:
        return datetime.strptime(stem, _TIME).replace(tzinfo=UTC) if rest.endswith(".json") else None
    except ValueError:
        return None


def _folder(node: str) -> str:
    return f"{FOLDER}/{quote(node, safe='')}"
