"""The outer flow: reinforcement learning from verifiable rewards, from plan to last leg. Holds no accelerator."""

from prefect import flow, get_run_logger

from flows.train_leg import run_train_leg
from roll_core.errors import LegFailed
from roll_core.store.object_store import ObjectStore
from roll_core.store.runs import read_chain, read_config
from roll_core.store.summary import RunSummary
from roll_core.tracking.spool import RunStatus
from roll_core.types.manifest import LegEnded
from roll_core.types.refs import RunRef
from tasks.legs import note_end, run_leg
from tasks.progress import announce_run
from tasks.runs import find_run, open_fork, open_run
from tasks.summary import summarize


@flow(name="rlvr")
def rlvr(config: str, overrides: list[str] | None = None) -> RunSummary:
    """Open a new run of a config and carry it to its last iteration."""
    return carry_on(open_run(config, overrides or []))


@flow(name="rlvr-resume", flow_run_name="resume {run_id}")
def rlvr_resume(run_id: str, store: str) -> RunSummary:
    """Carry on a run that was stopped, killed or lost."""
    return carry_on(find_run(run_id, store))


@flow(name="rlvr-fork", flow_run_name="fork {run_id}@{iteration}")
def rlvr_fork(run_id: str, iteration: int, store: str, overrides: list[str] | None = None) -> RunSummary:
    """Go on from another run's iteration, with another config, as a run of its own."""
    return carry_on(open_fork(run_id, iteration, overrides or [], store))


def carry_on(run: RunRef) -> RunSummary:
    """Leg after leg until the run is done, or until legs keep failing without committing anything."""
    logger = get_run_logger()
    announce_run(run)
    legs = read_config(run).legs
    number, committed, failures = next_leg(run), last_iteration(run), 0
    while True:
        ended = run_leg(run, number, run_train_leg)
        if ended.finished:
            return summarize(run)
        if ended.fenced:
            raise LegFailed(ended.cause)
        failures = 1 if ended.last_iteration > committed else failures + 1
        number, committed = number + 1, ended.last_iteration
        logger.warning("leg %d ended at iteration %d: %s", ended.leg, ended.last_iteration, ended.cause)
        if failures > legs.max_failures:
            note_end(run, RunStatus.FAILED)
            raise LegFailed(give_up(ended, failures))


def give_up(ended: LegEnded, failures: int) -> str:
    reached = f"at iteration {ended.last_iteration}" if ended.last_iteration >= 0 else "before its first commit"
    return f"{ended.run_id} stopped {reached} after {failures} failed leg(s); the last one: {ended.cause}"


def next_leg(run: RunRef) -> int:
    """Legs are numbered over the whole life of a run."""
    chain = read_chain(ObjectStore(run.store_uri), run.run_id)
    return chain[-1].leg + 1 if chain else 1


def last_iteration(run: RunRef) -> int:
    chain = read_chain(ObjectStore(run.store_uri), run.run_id)
    return chain[-1].iteration if chain else -1
