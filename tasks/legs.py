"""Legs: launched, waited for, and read for why they ended. The one module that knows how legs are launched."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import submitit
from prefect.context import serialize_context

from infra.slurm.launcher import submit_leg
from roll_core.config.placement import DeviceKind
from roll_core.config.run import RunConfig
from roll_core.errors import FailureClass, IterationTaken, RollError, StoreUnavailable, classify, one_line
from roll_core.store.object_store import ObjectStore
from roll_core.store.runs import read_chain, read_config, store_of
from roll_core.tracking.spool import RunStatus
from roll_core.tracking.tracker import Tracker
from roll_core.types.manifest import LegEnded
from roll_core.types.refs import RunRef
from tasks.durability import state_changing
from tasks.progress import GLANCE_SECONDS, ManifestWatch
from tasks.services import run_dir

POLL_S = 0.2
"""How often a leg's end and its newest manifest are looked for; a look costs one small read."""

TAKE_DOWN_S = 30.0
"""submitit kills what has not ended within about a second of being asked."""

LegFunction = Callable[[RunRef, int, dict[str, Any], int], LegEnded]


@state_changing("leg {leg}")
def run_leg(run: RunRef, leg: int, function: LegFunction) -> LegEnded:
    """Launch a leg and wait for it. A leg that dies without an answer is an answer too; being interrupted takes it along."""
    config = read_config(run)
    folder = run_dir(run, config) / f"leg-{leg}"
    watch = ManifestWatch(run, next_iteration=len(read_chain(store_of(run), run.run_id)))
    num_gpus = config.cluster.devices_per_node if config.cluster.device is DeviceKind.CUDA else 0
    job = submit_leg(config.legs, num_gpus, folder, function, (run, leg, serialize_context(), os.getpid()))
    try:
        while not job.done():
            watch.look()
            time.sleep(POLL_S)
    except BaseException:
        _take_down(job)
        note_end(run, config, RunStatus.KILLED)
        raise
    watch.look()
    return _read_ending(job, run, leg).model_copy(update={"log": str(job.paths.stdout)})


def note_end(run: RunRef, config: RunConfig, status: RunStatus) -> None:
    """Tell the tracker that a run ended before its last iteration. The uploader does it by itself, beside or after us."""
    tracker = Tracker(config.tracking, run, run_dir(run, config) / "tracking")
    tracker.end(status)
    tracker.start()


def _take_down(job: submitit.Job[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        job.cancel()
    ends_at = time.monotonic() + TAKE_DOWN_S
    while not job.done() and time.monotonic() < ends_at:
        time.sleep(POLL_S)


def _last_line(error: Exception) -> str:
    """What a traceback comes down to; submitit's messages carry the leg's own, and then say where its logs are."""
    trace = str(error).split("You can check full logs")[0]
    lines = [line.strip() for line in trace.splitlines() if line.strip(" -=")]
    return lines[-1] if lines else type(error).__name__


def _read_ending(job: submitit.Job[Any], run: RunRef, leg: int) -> LegEnded:
    try:
        return job.result()
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError, RollError) as error:
        cause = f"the leg's process died ({_last_line(error)})"
        return _ended_early(run, leg, cause, FailureClass.TRANSIENT, fenced=False)


def leg_failed(run: RunRef, leg: int, error: Exception) -> LegEnded:
    """The answer of a leg that ended early, with what it had committed."""
    return _ended_early(run, leg, one_line(error), classify(error), fenced=isinstance(error, IterationTaken))


def _last_iteration(run: RunRef) -> int | None:
    """A glance: a store that is away has been waited for, and may be why the leg ended."""
    try:
        chain = read_chain(ObjectStore(run.store_uri, GLANCE_SECONDS), run.run_id)
    except StoreUnavailable:
        return None
    return chain[-1].iteration if chain else -1


def _ended_early(run: RunRef, leg: int, cause: str, failure: FailureClass, *, fenced: bool) -> LegEnded:
    return LegEnded(
        run_id=run.run_id,
        leg=leg,
        last_iteration=_last_iteration(run),
        finished=False,
        fenced=fenced,
        cause=cause,
        failure=failure,
    )
