"""Launch of legs: submit a leg's job, wait for its end, and determine why it ended.

Used by the flows and by `roll leg`. Only this file and `leg_requests.py` know the launchers of `infra/slurm`.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.slurm import slurm
from infra.slurm.elastic import ElasticJobs
from infra.slurm.launcher import JobEnd, Launcher, LegFunction, LegJob, LegRequest
from infra.slurm.local import LocalLauncher
from infra.slurm.node import NodeShape, run_head, run_worker
from infra.slurm.queue import STILL_RUNNING, SlurmUnavailable, wait_for_controller
from roll_core.config.operations import legs as launchers
from roll_core.config.run import RunConfig
from roll_core.errors import (
    DeviceFault,
    FailureClass,
    IterationTaken,
    LegInterrupted,
    NodeUnfit,
    RollError,
    UserError,
    classify,
    one_line,
    origin,
)
from roll_core.host import make_files_private, make_private_folder
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.nodes import excluded_nodes
from roll_core.store.records.runs import next_iteration, read_config, store_of
from roll_core.tracking.spool import RunStatus
from roll_core.tracking.tracker import Tracker
from roll_core.types.leg import LegAllocation, LegEnded, LegEnding
from roll_core.types.refs import RunRef
from tasks.durability import state_changing
from tasks.leg_requests import ELASTIC, LEG, job_prefix, leg_request
from tasks.progress import ManifestWatch, announce_obstacle
from tasks.services import SHORT_RETRY_SECONDS, record_node_failures, run_dir

log = logging.getLogger(__name__)

CANCEL_S = 90.0
"""Seconds to wait for a cancelled job to end. By default SLURM kills it after half a minute."""

REQUEUE_EXIT_CODE = slurm.REQUEUE_EXIT_CODE
"""Exit code of `roll leg` that asks its sbatch script to requeue the job for the next leg."""

LegEntryPoint = Callable[[RunRef, int, dict[str, Any] | None, LegAllocation], LegEnded]
"""Function (run, leg number, Prefect context, allocation) that runs a leg in the driver's process.

The context makes the leg a child of the flow that launches it; None if the leg cannot reach that flow's Prefect server.
"""
ContextFor = Callable[[RunConfig], dict[str, Any] | None]
"""Function that returns the Prefect context for a leg, or None, given the run's config."""


@state_changing("leg {leg}")
def run_leg(
    run: RunRef, leg: int, function: LegEntryPoint, context_for: ContextFor, avoid: tuple[str, ...] = ()
) -> LegEnded:
    """Launch a leg and wait for its end; adopt the leg's job if a flow that was killed has submitted it already. The leg
    runs on other nodes than those to `avoid`, if there are enough.

    A leg that dies also yields a LegEnded. If this task is interrupted or cancelled, the leg's job is cancelled.
    """
    config = read_config(run)
    store, launcher = store_of(run), build_launcher(config)
    request = leg_request(run, config, leg, excluded_nodes(store, config.nodes, datetime.now(UTC)), avoid)
    watch = ManifestWatch(run, next_iteration(store, run.run_id))
    leg_function = functools.partial(function, run, leg, context_for(config))
    make_private_folder(run_dir(run, config))
    job = wait_for_controller(lambda: adopt_or_submit(launcher, request, leg_function), announce_obstacle)
    elastic = elastic_jobs(run, config)
    try:
        wait_for_end(job, watch, elastic)
    except BaseException:
        _cancel(job)
        record_end(run, config, RunStatus.KILLED)
        raise
    end = job.end()
    for each in [end, *(elastic.ended if elastic is not None else ())]:
        record_node_failures(run, leg, dict.fromkeys(each.lost_nodes, each.cause))
    return read_ending(end, run, leg).model_copy(update={"log": str(job.log), "nodes": end.nodes})


def adopt_or_submit(launcher: Launcher, request: LegRequest, leg: LegFunction) -> LegJob:
    """Return the job of a leg: the one of its name that is pending or running, else a new one.

    A submission that failed is repeated by calling this again: SLURM may have accepted it although its answer was lost.
    """
    job_id = launcher.find(request.name).get(request.name)
    if job_id is not None:
        return launcher.attach(job_id, request.folder)
    job = launcher.submit(request, leg)
    make_files_private(request.folder)
    return job


def build_launcher(config: RunConfig) -> Launcher:
    """Build the launcher that `legs.launcher` selects."""
    match config.legs.launcher:
        case launchers.LocalLauncherConfig():
            return LocalLauncher()
        case launchers.SlurmLauncherConfig() as section:
            return slurm.SlurmLauncher(section)


@contextlib.contextmanager
def cancelling_elastic_jobs(run: RunRef) -> Iterator[None]:
    """Cancel all elastic jobs of a run at the end of the block, however it ends."""
    elastic = elastic_jobs(run, read_config(run))  # read now: if the store is down at the end, jobs must still be cancelled
    try:
        yield
    finally:
        with contextlib.suppress(SlurmUnavailable):
            _cancel(*(elastic.find() if elastic is not None else ()))


def elastic_jobs(run: RunRef, config: RunConfig) -> ElasticJobs | None:
    """Return the elastic jobs of a run; None if the config has no `legs.elastic`."""
    elastic, launcher = config.legs.elastic, config.legs.launcher
    if elastic is None or not isinstance(launcher, launchers.SlurmLauncherConfig):
        return None
    folder = run_dir(run, config)
    each = replace(
        leg_request(run, config, leg=0, exclude=excluded_nodes(store_of(run), config.nodes, datetime.now(UTC))),
        name=job_prefix(run, ELASTIC),
        folder=folder / "elastic",
        nodes=1,
        time_limit_minutes=elastic.time_limit_minutes or config.legs.time_limit_minutes,
    )
    return ElasticJobs(slurm.SlurmLauncher(elastic.merged_with(launcher)), each, elastic.nodes, folder)


def orphaned_leg(run: RunRef) -> int | None:
    """Number of the leg whose job is pending or running although its flow is gone; None if there is none.

    Call it before the flow submits a leg of its own.
    """
    prefix, launcher = job_prefix(run), build_launcher(read_config(run))
    names = wait_for_controller(lambda: launcher.find(prefix), announce_obstacle)
    return max((int(name.removeprefix(prefix)) for name in names), default=None)


def describe_jobs(run: RunRef) -> list[str]:
    """Describe the pending and running jobs of a run. Example: leg 3, job 1207: waits for 25 min (Priority)"""
    config = read_config(run)
    launcher, sentences = build_launcher(config), []
    for purpose, word in ((LEG, "leg"), (ELASTIC, "elastic node")):
        prefix = job_prefix(run, purpose)
        for name, job_id in launcher.find(prefix).items():
            doing = launcher.attach(job_id, run_dir(run, config)).describe()
            sentences.append(f"{word} {name.removeprefix(prefix)}, job {job_id}: {doing}")
    return sentences


def run_leg_here(run: RunRef, leg: int, function: LegEntryPoint) -> LegEnded:
    """Run a leg within the SLURM job that this process is the first task of."""
    config = read_config(run)
    report = run_head(functools.partial(function, run, leg, None), *_node_shape_and_folder(config, run.run_id))
    return read_ending(slurm.read_end(STILL_RUNNING, report), run, leg)


def join_leg_here(config: RunConfig, run_id: str) -> None:
    """Serve one node of a leg, other than the leg's first node, until the leg ends. This process is a task of the SLURM job
    that holds the leg's nodes."""
    run_worker(*_node_shape_and_folder(config, run_id))


def _node_shape_and_folder(config: RunConfig, run_id: str) -> tuple[NodeShape, Path]:
    """Resources of each node of this SLURM job, and the folder of its rendezvous file, which is the same for all legs."""
    assert isinstance(config.legs.launcher, launchers.SlurmLauncherConfig)
    if (given := int(os.environ["SLURM_JOB_NUM_NODES"])) != config.cluster.nodes:
        raise UserError(f"cluster.nodes ({config.cluster.nodes}) is not what this job has ({given}): sbatch --nodes=...")
    run = RunRef(run_id=run_id, store_uri=config.store.uri, config_digest="")
    folder = run_dir(run, config)
    make_private_folder(folder)
    return slurm.node_shape(config.legs.launcher, leg_request(run, config, leg=0)), folder


def wait_for_end(job: LegJob, watch: ManifestWatch, elastic: ElasticJobs | None) -> None:
    """Wait until a leg's job ends. Meanwhile announce committed iterations, say what a person must do for a job that is
    held, and keep the elastic jobs in the queue."""
    obstacle = ""
    while not job.has_ended():
        watch.poll()
        if job.obstacle not in ("", obstacle):
            announce_obstacle(job.obstacle)
        obstacle = job.obstacle
        if elastic is not None:
            elastic.poll(job.nodes, time.monotonic())
        time.sleep(job.poll_s)
    watch.poll()


def read_ending(end: JobEnd, run: RunRef, leg: int) -> LegEnded:
    """Return how a leg ended: its own result, unless the launcher knows the cause better (a lost node, a cancelled job)."""
    match end.result:
        case LegEnded(ending=LegEnding.FINISHED | LegEnding.FENCED) as result:
            return result
        case LegEnded() as result if end.ending is None:
            return result
        case LegEnded(ending=LegEnding.WALLTIME | LegEnding.PREEMPTED) as result if end.ending is not LegEnding.CANCELLED:
            return result
        case LegEnded() as result:
            cause = "; ".join(filter(None, [result.cause, end.cause]))
            return result.model_copy(update={"ending": end.ending, "cause": cause, "lost_nodes": end.lost_nodes})
        case _:
            ended = _ended_early(run, leg, end.ending or LegEnding.FAILED, end.cause, FailureClass.TRANSIENT)
            return ended.model_copy(update={"lost_nodes": end.lost_nodes})


def record_end(run: RunRef, config: RunConfig, status: RunStatus) -> None:
    """Record in the tracker that a run ended before its last iteration. The uploader, a process of its own, delivers it."""
    tracker = Tracker(config.tracking, run, run_dir(run, config) / "tracking")
    tracker.end(status)
    tracker.start()


def _cancel(*jobs: LegJob) -> None:
    """Cancel jobs and wait until they have ended, CANCEL_S at most."""
    for job in jobs:
        with contextlib.suppress(SlurmUnavailable):
            job.cancel()
    ends_at = time.monotonic() + CANCEL_S
    for job in jobs:
        while not job.has_ended() and time.monotonic() < ends_at:
            time.sleep(job.poll_s)


def leg_failed(run: RunRef, leg: int, error: Exception) -> LegEnded:
    """Return the LegEnded of a leg that an exception ended."""
    raised = origin(error)
    match raised:
        case IterationTaken():
            ending = LegEnding.FENCED
        case NodeUnfit() if not isinstance(raised, DeviceFault):  # a defect of a kernel, too, can look like a broken GPU
            ending = LegEnding.NODE_FAIL
        case LegInterrupted():
            ending = LegEnding.PREEMPTED
        case _:
            ending = LegEnding.FAILED
    ended = _ended_early(run, leg, ending, one_line(error), classify(error))
    return ended.model_copy(update={"lost_nodes": tuple(raised.reasons) if isinstance(raised, NodeUnfit) else ()})


def _last_iteration(run: RunRef) -> int | None:
    """Number of the last committed iteration, -1 for none; None if the store is down or a manifest is damaged.

    The store is retried only briefly: its outage may be why the leg ended, and then the leg has already waited for it.
    """
    try:
        return next_iteration(ObjectStore(run.store_uri, SHORT_RETRY_SECONDS), run.run_id) - 1
    except RollError as error:
        log.warning("the manifests of %s cannot be read: %s", run.run_id, one_line(error))
        return None


def _ended_early(run: RunRef, leg: int, ending: LegEnding, cause: str, failure: FailureClass) -> LegEnded:
    return LegEnded(
        run_id=run.run_id, leg=leg, ending=ending, last_iteration=_last_iteration(run), cause=cause, failure=failure
    )
