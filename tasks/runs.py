"""Tasks that open, find, fork and summarize runs. Used by `flows/rlvr.py` and `roll leg`."""

import logging

from roll_core.config.load import load_config
from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.host import make_private_folder
from roll_core.planning.preflight import check_origins, check_ready, with_teachers_pinned
from roll_core.reporting.report import render_report
from roll_core.store.object_store import ObjectStore
from roll_core.store.records import runs
from roll_core.store.records.forks import forked_config
from roll_core.store.records.runs import RunSummary, summary_of
from roll_core.types.refs import RunRef
from tasks.durability import state_changing
from tasks.leg_requests import check_submission
from tasks.services import run_dir

log = logging.getLogger(__name__)


@state_changing("open run")
def open_run(config_path: str, overrides: list[str]) -> RunRef:
    """Open a new run: check that everything its config needs is available, then claim a run name."""
    config = load_config(config_path, overrides)
    check_ready(config)
    check_submission(config)
    return _claim(ObjectStore(config.store.uri, config.store.retry_seconds), config)


def open_or_find(config_path: str, overrides: list[str], run_id: str) -> RunRef:
    """Return the run with a given name; open it if it does not exist."""
    config = load_config(config_path, overrides)
    check_ready(config)
    return runs.open_or_find_run(
        ObjectStore(config.store.uri, config.store.retry_seconds), with_teachers_pinned(config), run_id
    )


@state_changing("fork {run_id}@{iteration}")
def open_fork(run_id: str, iteration: int, overrides: list[str], store_uri: str) -> RunRef:
    """Open a new run that continues from an iteration of another run, with overrides to that run's config."""
    store = ObjectStore(store_uri)
    config = forked_config(store, run_id, iteration, overrides)
    check_ready(config)
    check_submission(config)
    return _claim(store, config)


@state_changing("find run")
def find_run(run_id: str, store_uri: str) -> RunRef:
    """Look up a run of a store; UserError if it does not exist."""
    return runs.find_run(ObjectStore(store_uri), run_id)


@state_changing("summary")
def summarize(run: RunRef) -> RunSummary:
    """Write the run's HTML report into its work folder, and return its summary. A full disk costs the report only."""
    config = runs.read_config(run)
    chain = runs.read_chain(runs.store_of(run), run.run_id)
    report = run_dir(run, config) / "report.html"
    try:
        make_private_folder(report.parent)
        report.write_text(render_report(run.run_id, config, chain))
    except OSError as error:
        log.warning("%s has no report: %s", run.run_id, error)
    return summary_of(run.run_id, chain)


def _claim(store: ObjectStore, config: RunConfig) -> RunRef:
    """Claim a name for a new run, then check its origins again: the checkpoints of other runs that it starts from.

    An origin may have been retired since the first check. From the claim on it cannot be, since the stored config names it.
    """
    pinned = with_teachers_pinned(config)
    run = runs.open_run(store, pinned)
    try:
        check_origins(pinned)
    except UserError:
        runs.release_run(store, run)
        raise
    return run
