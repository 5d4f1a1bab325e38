"""The outer flow: reinforcement learning from verifiable rewards, from plan to last leg. Holds no accelerator."""

from collections.abc import Sequence
from itertools import count, takewhile

from prefect import flow, get_run_logger

from flows.train_leg import run_train_leg
from roll_core.errors import FailureClass, LegFailed
from roll_core.store.runs import read_chain, read_config, store_of
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
    """Leg after leg until the run is done, or until there is a reason to stop."""
    logger = get_run_logger()
    announce_run(run)
    config = read_config(run)
    endings: list[LegEnded] = []
    for number in count(next_leg(run)):
        ended = run_leg(run, number, run_train_leg)
        if ended.finished:
            break
        if ended.fenced:
            raise LegFailed(ended.cause)
        endings.append(ended)
        logger.warning("leg %d ended at iteration %d: %s", ended.leg, ended.last_iteration, ended.cause)
        reason = reason_to_stop(endings, config.legs.max_failures)
        if reason is not None:
            note_end(run, config, RunStatus.FAILED)
            raise LegFailed(reason)
    return summarize(run)


def reason_to_stop(endings: Sequence[LegEnded], max_failures: int) -> str | None:
    """Why no leg should follow these, all of which failed, the last one last; None if one should."""
    last = endings[-1]
    stuck = list(takewhile(lambda ended: ended.last_iteration == last.last_iteration, reversed(endings)))
    match last.last_iteration:
        case None:
            reached = "without its store"
        case -1:
            reached = "before its first commit"
        case iteration:
            reached = f"at iteration {iteration}"
    told = f"{last.cause} (log: {last.log})"
    if len(stuck) > 1 and failed_alike(last, stuck[1]):
        return f"{last.run_id} stopped {reached}: two legs in a row failed in the same way: {told}"
    if len(stuck) > max_failures:
        return f"{last.run_id} stopped {reached} after {len(stuck)} failed leg(s); the last one: {told}"
    return None


def failed_alike(one: LegEnded, other: LegEnded) -> bool:
    """The same input failed twice, and not by chance."""
    return one.failure is other.failure is FailureClass.DETERMINISTIC and one.cause == other.cause


def next_leg(run: RunRef) -> int:
    """Legs are numbered over the whole life of a run."""
    chain = read_chain(store_of(run), run.run_id)
    return chain[-1].leg + 1 if chain else 1
