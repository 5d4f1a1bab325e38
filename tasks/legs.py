"""Legs: launched, waited for, and read for why they ended. The one module that knows how legs are launched."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.slurm import slurm
from infra.slurm.elastic import ElasticJobs
from infra.slurm.launcher import JobEnd, Launcher, LegJob
from infra.slurm.local import LocalLauncher
from infra.slurm.node import NodeShape, follow, lead
from infra.slurm.queue import STILL_RUNNING, SlurmUnavailable
from roll_core.config.operations import legs as launchers
from roll_core.config.run import RunConfig
from roll_core.errors import FailureClass, IterationTaken, NodeUnfit, StoreUnavailable, UserError, classify, one_line
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.nodes import NodeFailure, excluded_nodes, note_failure
from roll_core.store.records.runs import read_chain, read_config, store_of
from roll_core.tracking.spool import RunStatus
from roll_core.tracking.tracker import Tracker
from roll_core.types.leg import LegAllocation, LegEnded, LegEnding
from roll_core.types.refs import RunRef
from tasks.durability import state_changing
from tasks.leg_requests import ELASTIC, LEG, job_prefix, leg_request
from tasks.progress import GLANCE_SECONDS, ManifestWatch
from tasks.services import run_dir

TAKE_DOWN_S = 90.0
"""How long a job that was cancelled may take to end: SLURM gives it half a minute by default, then kills."""

CHAINED = slurm.CHAINED
"""Exit code of `roll leg` after which its script goes on with the next."""

LegFunction = Callable[[RunRef, int, dict[str, Any] | None, LegAllocation], LegEnded]
"""With the context of the flow that launches it; null if its Prefect server cannot be reached from the leg."""
ContextFor = Callable[[RunConfig], dict[str, Any] | None]


@state_changing("leg {leg}")
def run_leg(run: RunRef, leg: int, function: LegFunction, context_for: ContextFor) -> LegEnded:
    """Launch a leg, or take over one that a flow left behind that was killed, and wait for it.

    A leg that dies without an answer is an answer too; being interrupted takes it along.
    """
    config = read_config(run)
    store, launcher = store_of(run), launcher_of(config)
    request = leg_request(run, config, leg, excluded_nodes(store, config.nodes, datetime.now(UTC)))
    watch = ManifestWatch(run, next_iteration=len(read_chain(store, run.run_id)))
    left_behind = launcher.find(request.name).get(request.name)
    if left_behind is None:
        job = launcher.submit(request, functools.partial(function, run, leg, context_for(config)))
    else:
        job = launcher.attach(left_behind, request.folder)
    elastic = elastic_jobs(run, config)
    try:
        wait_for_end(job, watch, elastic)
    except BaseException:
        _take_down(job)
        note_end(run, config, RunStatus.KILLED)
        raise
    end = job.end()
    for each in [end, *(elastic.ended if elastic is not None else ())]:
        for node in each.lost_nodes:
            at = datetime.now(UTC)
            note_failure(store, NodeFailure(node=node, reason=each.cause, run_id=run.run_id, leg=leg, at=at))
    return read_ending(end, run, leg).model_copy(update={"log": str(job.log)})


def launcher_of(config: RunConfig) -> Launcher:
    match config.legs.launcher:
        case launchers.LocalLauncherConfig():
            return LocalLauncher()
        case launchers.SlurmLauncherConfig() as section:
            return slurm.SlurmLauncher(section)


@contextlib.contextmanager
def elastic_nodes_go(run: RunRef) -> Iterator[None]:
    """Whatever `legs.elastic` has in the queue is gone after this block, however it ends."""
    elastic = elastic_jobs(run, read_config(run))  # now: a store that is away at the end must not keep them
    try:
        yield
    finally:
        with contextlib.suppress(SlurmUnavailable):
            _take_down(*(elastic.find() if elastic is not None else ()))


def elastic_jobs(run: RunRef, config: RunConfig) -> ElasticJobs | None:
    """What a leg has in the queue beside itself; None where it wants nothing."""
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
    return ElasticJobs(slurm.SlurmLauncher(elastic.launcher_of(launcher)), each, elastic.nodes, folder)


def leg_left_behind(run: RunRef) -> int | None:
    """A leg whose job waits or runs, though the flow that launched it is gone."""
    prefix = job_prefix(run)
    return max((int(name.removeprefix(prefix)) for name in launcher_of(read_config(run)).find(prefix)), default=None)


def describe_jobs(run: RunRef) -> list[str]:
    """What the jobs of a run that are not over are doing. Example: leg 3, job 1207: waits for 25 min (Priority)"""
    config = read_config(run)
    launcher, sentences = launcher_of(config), []
    for what, word in ((LEG, "leg"), (ELASTIC, "elastic node")):
        prefix = job_prefix(run, what)
        for name, job_id in launcher.find(prefix).items():
            doing = launcher.attach(job_id, run_dir(run, config)).describe()
            sentences.append(f"{word} {name.removeprefix(prefix)}, job {job_id}: {doing}")
    return sentences


def run_leg_here(run: RunRef, leg: int, function: LegFunction) -> LegEnded:
    """A leg on the nodes of the allocation whose first this is."""
    config = read_config(run)
    report = lead(functools.partial(function, run, leg, None), *_node_of(config, run.run_id))
    return read_ending(slurm.read_end(STILL_RUNNING, report), run, leg)


def join_leg_here(config: RunConfig, run_id: str) -> None:
    """The same on the other nodes."""
    follow(*_node_of(config, run_id))


def _node_of(config: RunConfig, run_id: str) -> tuple[NodeShape, Path]:
    """What each node of a leg offers, and where they meet: a place that does not depend on which leg it is."""
    assert isinstance(config.legs.launcher, launchers.SlurmLauncherConfig)
    if (given := int(os.environ["SLURM_JOB_NUM_NODES"])) != config.cluster.nodes:
        raise UserError(f"cluster.nodes ({config.cluster.nodes}) is not what this job has ({given}): sbatch --nodes=...")
    run = RunRef(run_id=run_id, store_uri=config.store.uri, config_digest="")
    folder = run_dir(run, config)
    folder.mkdir(parents=True, exist_ok=True)
    return slurm.node_shape(config.legs.launcher, leg_request(run, config, leg=0)), folder


def wait_for_end(job: LegJob, watch: ManifestWatch, elastic: ElasticJobs | None) -> None:
    """Announce what is committed until the job is over; have nodes queued beside it, where it wants some."""
    while not job.has_ended():
        watch.look()
        if elastic is not None:
            elastic.look(job.nodes, time.monotonic())
        time.sleep(job.poll_s)
    watch.look()


def read_ending(end: JobEnd, run: RunRef, leg: int) -> LegEnded:
    """The leg's own answer, unless the launcher knows better why it failed or was interrupted."""
    match end.answer:
        case LegEnded(ending=LegEnding.FINISHED | LegEnding.FENCED) as answer:
            return answer
        case LegEnded() as answer if end.ending is None:
            return answer
        case LegEnded(ending=LegEnding.WALLTIME | LegEnding.PREEMPTED) as answer if end.ending is not LegEnding.CANCELLED:
            return answer
        case LegEnded() as answer:
            cause = "; ".join(filter(None, [answer.cause, end.cause]))
            return answer.model_copy(update={"ending": end.ending, "cause": cause, "lost_nodes": end.lost_nodes})
        case _:
            ended = _ended_early(run, leg, end.ending or LegEnding.FAILED, end.cause, FailureClass.TRANSIENT)
            return ended.model_copy(update={"lost_nodes": end.lost_nodes})


def note_end(run: RunRef, config: RunConfig, status: RunStatus) -> None:
    """Tell the tracker that a run ended before its last iteration. The uploader does it by itself, beside or after us."""
    tracker = Tracker(config.tracking, run, run_dir(run, config) / "tracking")
    tracker.end(status)
    tracker.start()


def _take_down(*jobs: LegJob) -> None:
    for job in jobs:
        with contextlib.suppress(SlurmUnavailable):
            job.cancel()
    ends_at = time.monotonic() + TAKE_DOWN_S
    for job in jobs:
        while not job.has_ended() and time.monotonic() < ends_at:
            time.sleep(job.poll_s)


def leg_failed(run: RunRef, leg: int, error: Exception) -> LegEnded:
    """The answer of a leg that ended early, with what it had committed."""
    match error:
        case IterationTaken():
            ending = LegEnding.FENCED
        case NodeUnfit():
            ending = LegEnding.NODE_FAIL
        case _:
            ending = LegEnding.FAILED
    return _ended_early(run, leg, ending, one_line(error), classify(error))


def _last_iteration(run: RunRef) -> int | None:
    """A glance: a store that is away has been waited for, and may be why the leg ended."""
    try:
        chain = read_chain(ObjectStore(run.store_uri, GLANCE_SECONDS), run.run_id)
    except StoreUnavailable:
        return None
    return chain[-1].iteration if chain else -1


def _ended_early(run: RunRef, leg: int, ending: LegEnding, cause: str, failure: FailureClass) -> LegEnded:
    return LegEnded(
        run_id=run.run_id, leg=leg, ending=ending, last_iteration=_last_iteration(run), cause=cause, failure=failure
    )
