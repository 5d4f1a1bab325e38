"""The outer flow: reinforcement learning from verifiable rewards, from plan to last leg. Holds no accelerator."""

from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import prefect.runtime
from prefect import flow, get_run_logger
from prefect.context import serialize_context

from flows.leg_process import run_train_leg
from flows.prefect_server import is_embedded
from roll_core.config.operations.legs import LegsConfig, LocalLauncherConfig, SlurmLauncherConfig
from roll_core.config.run import RunConfig
from roll_core.errors import FailureClass, LegFailed
from roll_core.store.records.runs import RunSummary, read_chain, read_config, store_of
from roll_core.tracking.spool import RunStatus
from roll_core.types.leg import LegEnded, LegEnding
from roll_core.types.refs import RunRef
from tasks.legs import elastic_nodes_go, leg_left_behind, note_end, run_leg
from tasks.progress import announce_run
from tasks.runs import find_run, open_fork, open_run, summarize


def config_name() -> str:
    """The run's own name is known when it is open, and then its legs have it."""
    return Path(prefect.runtime.flow_run.parameters["config"]).stem


@flow(name="rlvr", flow_run_name=config_name)
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
    with elastic_nodes_go(run):
        for number in count(leg_left_behind(run) or next_leg(run)):
            ended = run_leg(run, number, run_train_leg, context_for_leg)
            if ended.ending is LegEnding.FINISHED:
                break
            if ended.ending is LegEnding.FENCED:
                raise LegFailed(ended.cause)
            endings.append(ended)
            logger.warning("leg %d: %s at iteration %s: %s", ended.leg, ended.ending, ended.last_iteration, ended.cause)
            reason = reason_to_stop(endings, config.legs)
            if reason is not None:
                note_end(run, config, RunStatus.FAILED)
                raise LegFailed(reason)
    return summarize(run)


def should_follow(run: RunRef, ended: LegEnded, num_restarts: int) -> bool:
    """Whether a script that carries a run without a flow should go on. It knows of legs before this one only how many there
    were: `legs.max_interruptions` of them, unless this one has committed something."""
    if ended.ending not in (LegEnding.WALLTIME, LegEnding.PREEMPTED, LegEnding.NODE_FAIL):
        return False
    chain = read_chain(store_of(run), run.run_id)
    progressed = bool(chain) and chain[-1].leg == ended.leg
    return progressed or num_restarts < read_config(run).legs.max_interruptions


def context_for_leg(config: RunConfig) -> dict[str, Any] | None:
    """By which a leg becomes a child of the flow that launches it; None if it cannot reach its server: an embedded one is on
    this machine and ends with the command, as a SLURM leg does not."""
    unreachable = is_embedded() and isinstance(config.legs.launcher, SlurmLauncherConfig)
    return None if unreachable else serialize_context()


def reason_to_stop(endings: Sequence[LegEnded], legs: LegsConfig) -> str | None:
    """Why no leg should follow these, none of which finished, the last one last; None if one should."""
    last = endings[-1]
    stuck = list(takewhile(lambda ended: ended.last_iteration == last.last_iteration, reversed(endings)))
    match last.last_iteration:
        case None:
            reached = "without its store"
        case -1:
            reached = "before its first commit"
        case iteration:
            reached = f"at iteration {iteration}"
    stopped, told = f"{last.run_id} stopped {reached}", f"{last.cause} (log: {last.log})"
    if last.ending is LegEnding.CANCELLED:
        return f"{stopped}: the job of its leg was cancelled: {told}"
    if last.ending is LegEnding.FAILED and last.failure is FailureClass.DETERMINISTIC:
        if isinstance(legs.launcher, SlurmLauncherConfig):
            return f"{stopped}: another leg would fail in the same way: {told}"
        if len(stuck) > 1 and failed_alike(last, stuck[1]):
            return f"{stopped}: two legs in a row failed in the same way: {told}"
    alike, limit, word = policy(last.ending, legs)
    spent = sum(ended.ending in alike for ended in stuck)
    if spent > limit:
        return f"{stopped} after {spent} {word} leg(s); the last one: {told}"
    return None


def policy(ending: LegEnding, legs: LegsConfig) -> tuple[set[LegEnding], int, str]:
    """Endings that are counted together with this one, and how many legs in a row may end so at the same iteration."""
    interruptions = {LegEnding.PREEMPTED, LegEnding.NODE_FAIL}
    if isinstance(legs.launcher, LocalLauncherConfig):
        interruptions.remove(LegEnding.NODE_FAIL)  # there is no other node
    match ending:
        case _ if ending in interruptions:
            return interruptions, legs.max_interruptions, "interrupted"
        case LegEnding.WALLTIME:  # one may always: it has done its work
            return {LegEnding.WALLTIME}, max(1, legs.max_failures), "too short"
        case _:
            return (
                {LegEnding.FAILED, LegEnding.OUT_OF_MEMORY, LegEnding.NODE_FAIL} - interruptions,
                legs.max_failures,
                "failed",
            )


def failed_alike(one: LegEnded, other: LegEnded) -> bool:
    """The same input failed twice, and not by chance."""
    return one.failure is other.failure is FailureClass.DETERMINISTIC and one.cause == other.cause


def next_leg(run: RunRef) -> int:
    """Legs are numbered over the whole life of a run."""
    chain = read_chain(store_of(run), run.run_id)
    return chain[-1].leg + 1 if chain else 1
