"""Outer flow: runs reinforcement learning from verifiable rewards, leg after leg, until the run is done.

It launches legs and decides from their endings whether another one follows. It holds no accelerator.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import prefect.runtime
from prefect import flow, get_run_logger
from prefect.context import serialize_context

from flows.flow_runs import ON_END, crash_dead_flow_runs, hold_flow_run
from flows.leg_process import run_train_leg
from flows.prefect_server import is_embedded
from roll_core.config.operations.legs import LegsConfig, LocalLauncherConfig, SlurmLauncherConfig
from roll_core.config.run import RunConfig
from roll_core.errors import FailureClass, LegFailed
from roll_core.store.records.exports import is_finished
from roll_core.store.records.runs import RunSummary, read_chain, read_config, store_of
from roll_core.tracking.spool import RunStatus
from roll_core.types.leg import LegEnded, LegEnding
from roll_core.types.refs import RunRef
from tasks.legs import cancelling_elastic_jobs, orphaned_leg, record_end, run_leg
from tasks.progress import announce_run
from tasks.runs import find_run, open_fork, open_run, summarize
from tasks.services import run_dir

CANCELLED_LEG_S = 5.0
"""Seconds that a cancelled leg has to die before the flow ends. A local leg is killed one second after its interrupt."""


def flow_run_name() -> str:
    """Name of a flow run: the config's file name. The run id does not exist yet; names of legs contain it."""
    return Path(prefect.runtime.flow_run.parameters["config"]).stem


@flow(name="rlvr", flow_run_name=flow_run_name, **ON_END)
def rlvr(config: str, overrides: list[str] | None = None) -> RunSummary:
    """Open a new run of a config and train it to its last iteration."""
    return run_legs(open_run(config, overrides or []))


@flow(name="rlvr-resume", flow_run_name="resume {run_id}", **ON_END)
def rlvr_resume(run_id: str, store: str) -> RunSummary:
    """Resume a run that was stopped or killed. A finished run is summarized, and no leg is launched."""
    run = find_run(run_id, store)
    if is_finished(run):
        announce_run(run)
        return summarize(run)
    return run_legs(run)


@flow(name="rlvr-fork", flow_run_name="fork {run_id}@{iteration}", **ON_END)
def rlvr_fork(run_id: str, iteration: int, store: str, overrides: list[str] | None = None) -> RunSummary:
    """Fork a run: open a new run that starts from an iteration of another, with overrides, and train it."""
    return run_legs(open_fork(run_id, iteration, overrides or [], store))


def run_legs(run: RunRef) -> RunSummary:
    """Run legs one after another until the run is done. Raise LegFailed if no further leg should follow."""
    logger = get_run_logger()
    announce_run(run)
    config = read_config(run)
    hold_flow_run(run_dir(run, config))
    endings: list[LegEnded] = []
    with cancelling_elastic_jobs(run):
        for number in count(orphaned_leg(run) or next_leg(run)):
            with crashing_dead_legs(run_dir(run, config)):
                ended = run_leg(run, number, run_train_leg, context_for_leg, nodes_to_avoid(endings))
            if ended.ending is LegEnding.FINISHED:
                break
            if ended.ending is LegEnding.FENCED:
                raise LegFailed(ended.cause)
            endings.append(ended)
            logger.warning("leg %d: %s at iteration %s: %s", ended.leg, ended.ending, ended.last_iteration, ended.cause)
            reason = reason_to_stop(endings, config.legs)
            if reason is not None:
                record_end(run, config, RunStatus.FAILED)
                raise LegFailed(reason)
    return summarize(run)


@contextlib.contextmanager
def crashing_dead_legs(folder: Path) -> Iterator[None]:
    """Tell Prefect, after a leg, if its process died without reporting. A leg that was just cancelled gets time to die."""
    try:
        yield
    except BaseException:
        crash_dead_flow_runs(folder, CANCELLED_LEG_S)
        raise
    crash_dead_flow_runs(folder)


def should_requeue(run: RunRef, ended: LegEnded, num_restarts: int) -> bool:
    """True if the sbatch script of a run without a flow should requeue its job for another leg.

    The leg must have ended by walltime, preemption or a lost node. It must also have committed an iteration, or the job must
    have fewer than `legs.max_interruptions` restarts, which is all that the script knows about earlier legs.
    """
    if ended.ending not in (LegEnding.WALLTIME, LegEnding.PREEMPTED, LegEnding.NODE_FAIL):
        return False
    chain = read_chain(store_of(run), run.run_id)
    progressed = bool(chain) and chain[-1].leg == ended.leg
    return progressed or num_restarts < read_config(run).legs.max_interruptions


def context_for_leg(config: RunConfig) -> dict[str, Any] | None:
    """Return the Prefect context that makes a leg a child of this flow run; None if the leg cannot reach its server.

    A SLURM leg cannot reach an embedded server, which is on this machine only and ends with the command. The context travels
    in a file, so that it holds no settings: they contain Prefect's key and password. A leg has the same environment.
    """
    unreachable = is_embedded() and isinstance(config.legs.launcher, SlurmLauncherConfig)
    return None if unreachable else serialize_context() | {"settings_context": {}}


def reason_to_stop(endings: Sequence[LegEnded], legs: LegsConfig) -> str | None:
    """Return why no leg should follow these unfinished legs, in the order they ran; None if another leg should follow."""
    last = endings[-1]
    without_progress = list(takewhile(lambda ended: ended.last_iteration == last.last_iteration, reversed(endings)))
    match last.last_iteration:
        case None:
            reached = "without its store"
        case -1:
            reached = "before its first commit"
        case iteration:
            reached = f"at iteration {iteration}"
    stopped, cause_and_log = f"{last.run_id} stopped {reached}", f"{last.cause} (log: {last.log})"
    if last.ending is LegEnding.CANCELLED:
        return f"{stopped}: the job of its leg was cancelled: {cause_and_log}"
    if last.failure is FailureClass.MISTAKE:
        return f"{stopped}: another leg would fail in the same way: {cause_and_log}"
    if len(without_progress) > 1 and is_same_failure(last, without_progress[1]):
        return f"{stopped}: two legs in a row failed in the same way: {cause_and_log}"
    counted_endings, limit, word = ending_budget(last.ending, legs)
    num_counted = sum(ended.ending in counted_endings for ended in without_progress)
    if num_counted > limit:
        return f"{stopped} after {num_counted} {word} leg(s); the last one: {cause_and_log}"
    return None


def nodes_to_avoid(endings: Sequence[LegEnded]) -> tuple[str, ...]:
    """Nodes that the leg after these unfinished legs should avoid: those that the last leg lost, or all of its nodes if its
    failure is deterministic. If that failure repeats elsewhere, no machine is the cause."""
    if not endings:
        return ()
    last = endings[-1]
    is_deterministic = last.ending is LegEnding.FAILED and last.failure is FailureClass.DETERMINISTIC
    return last.lost_nodes or ((last.nodes,) if is_deterministic and last.nodes else ())


def ending_budget(ending: LegEnding, legs: LegsConfig) -> tuple[set[LegEnding], int, str]:
    """Return the retry budget of an ending: the endings that count together with it, the number of legs in a row that may
    end so at the same iteration, and an adjective for the error message."""
    interruptions = {LegEnding.PREEMPTED, LegEnding.NODE_FAIL}
    if isinstance(legs.launcher, LocalLauncherConfig):
        interruptions.remove(LegEnding.NODE_FAIL)  # this machine is the only node
    match ending:
        case _ if ending in interruptions:
            return interruptions, legs.max_interruptions, "interrupted"
        case LegEnding.WALLTIME:  # one is always allowed: the leg that reached this iteration counts too
            return {LegEnding.WALLTIME}, max(1, legs.max_failures), "too short"
        case _:
            return (
                {LegEnding.FAILED, LegEnding.OUT_OF_MEMORY, LegEnding.NODE_FAIL} - interruptions,
                legs.max_failures,
                "failed",
            )


def is_same_failure(one: LegEnded, other: LegEnded) -> bool:
    """True if two legs failed deterministically with the same cause."""
    are_deterministic = one.failure is other.failure is FailureClass.DETERMINISTIC
    return are_deterministic and one.ending is other.ending is LegEnding.FAILED and one.cause == other.cause


def next_leg(run: RunRef) -> int:
    """Number of the next leg of a run. Legs are numbered over the whole life of a run, from 1."""
    chain = read_chain(store_of(run), run.run_id)
    return chain[-1].leg + 1 if chain else 1
