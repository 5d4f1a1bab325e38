"""Opening and finding runs."""

from roll_core.config.load import load_config
from roll_core.planning.preflight import check_ready, with_teachers_pinned
from roll_core.store import runs
from roll_core.store.fork import forked_config
from roll_core.store.object_store import ObjectStore
from roll_core.types.refs import RunRef
from tasks.durability import state_changing


@state_changing("open run")
def open_run(config_path: str, overrides: list[str]) -> RunRef:
    """Check that everything the run needs is there, then claim its name."""
    config = load_config(config_path, overrides)
    check_ready(config)
    store = ObjectStore(config.store.uri, config.store.retry_seconds)
    return runs.open_run(store, with_teachers_pinned(config))


@state_changing("fork {run_id}@{iteration}")
def open_fork(run_id: str, iteration: int, overrides: list[str], store_uri: str) -> RunRef:
    """A new run that goes on from another's iteration, with another config."""
    store = ObjectStore(store_uri)
    config = forked_config(store, run_id, iteration, overrides)
    check_ready(config)
    return runs.open_run(store, with_teachers_pinned(config))


@state_changing("find run")
def find_run(run_id: str, store_uri: str) -> RunRef:
    return runs.find_run(ObjectStore(store_uri), run_id)
