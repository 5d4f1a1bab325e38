"""Inner flow: one leg of a run on one Ray cluster, iteration after iteration, until the run is done or the leg must stop."""

import contextlib
import logging
import shutil
import time
import traceback
from pathlib import Path

from httpx import HTTPStatusError, TransportError
from prefect import flow

from flows.flow_runs import ON_END, hold_flow_run
from flows.prefect_server import exit_soon
from roll_core.config.run import RunConfig, flat_config
from roll_core.errors import LegInterrupted, RoleDied
from roll_core.store.records.forks import lineage
from roll_core.store.records.runs import read_chain, read_config, store_of
from roll_core.tracking.spool import RunStatus
from roll_core.types.leg import LegAllocation, LegEnded, LegEnding
from roll_core.types.manifest import CollectRequest, Manifest, Updated
from roll_core.types.refs import RunRef, record_digest
from tasks.commit import IterationReceipts, commit
from tasks.durability import forget_dead_results
from tasks.export import store_export
from tasks.legs import leg_failed
from tasks.recover import recover
from tasks.services import SPOOL, STAGE_CACHE, Services, open_services, run_dir
from tasks.stages import (
    checkpoint,
    checkpoint_committed,
    collect,
    evaluate,
    prepare,
    publish,
    store_checkpoint,
    update,
    update_critic,
    warm_start,
)
from tasks.tracking import track_missed, track_receipt

DEAD_NODE_NOTICE_S = 30.0
"""Seconds after which Ray has noticed that a node is dead, so that roles are not restarted there. Ray checks a node five
times, three seconds apart, and may wait for each reply."""

log = logging.getLogger(__name__)


@flow(name="train_leg", flow_run_name="{run.run_id} leg {leg}", **ON_END)
def train_leg(run: RunRef, leg: int, allocation: LegAllocation) -> LegEnded:
    """Run iterations, manifest(n+1) = iterate(manifest(n)), until the run's last one or until the leg must stop."""
    hold_flow_run(run_dir(run, read_config(run)))
    with open_services(run, leg, allocation) as services:
        manifest = begin_or_recover(services)
        ending = LegEnding.FINISHED
        while manifest.iteration < services.config.iterations:
            if (reason := services.leg_time.stop_reason(services.fleet.checkpoint_s)) is not None:
                ending = reason
                break
            with contextlib.suppress(LegInterrupted):  # the leg was told to stop: the next look at its time ends the loop
                manifest = iterate(manifest, services)
                services.leg_time.record_iteration(manifest)
            forget_dead_results()
        close_leg(manifest, ending, services)
    return LegEnded(run_id=run.run_id, leg=leg, ending=ending, last_iteration=manifest.iteration)


def close_leg(manifest: Manifest, ending: LegEnding, services: Services) -> None:
    """Store what must outlive the leg: what was generated beyond its last iteration, a checkpoint of that iteration and, at
    the end of the run, the export."""
    if ending is not LegEnding.FINISHED:
        services.fleet.stop_rollouts()
        if services.holds_committed_weights:
            checkpoint_committed(manifest, services)
    track_receipt(manifest.iteration, store_checkpoint(services), services)
    if ending is LegEnding.FINISHED:
        export_at_end(manifest, services)
    services.background.close(services.config.tracking.drain_seconds)
    if ending is LegEnding.FINISHED:
        services.tracker.end(RunStatus.FINISHED)
        shutil.rmtree(run_dir(services.run, services.config) / SPOOL, ignore_errors=True)  # all of it is committed


def export_at_end(manifest: Manifest, services: Services) -> None:
    """Store the export of a finished run, if `checkpoint.export_at_end` is set and the leg was not told to stop."""
    if not services.config.checkpoint.export_at_end:
        return
    if services.leg_time.is_told_to_stop():
        command = f"roll export {manifest.run_id}@{manifest.iteration} FOLDER"
        log.warning("checkpoint.export_at_end: left out, because the leg was told to stop; make it with: %s", command)
        return
    track_receipt(manifest.iteration, store_export(manifest, services), services)


def iterate(manifest: Manifest, services: Services) -> Manifest:
    """Run one iteration: from the manifest of the iteration before to the manifest it commits."""
    config = services.config
    collected = collect(next_request(manifest, config), services)
    prepared = prepare(collected, services)
    critic_updated = update_critic(prepared, services) if config.algorithm.has_critic else None
    updated = update(prepared, services)
    published = publish(updated, services)
    evaluated = evaluate(updated, services) if is_due(updated, config.evaluation.every, config) else None
    saving = checkpoint(updated, published, services) if is_due(updated, config.checkpoint.every, config) else None
    return commit(manifest, IterationReceipts(prepared, critic_updated, updated, published, evaluated, saving), services)


def begin_or_recover(services: Services) -> Manifest:
    """Bring all roles to the policy of the run's last manifest, and return that manifest.

    A new run first commits iteration 0, and then recovers from it: every run proves at its start that it can be resumed.
    """
    chain = read_chain(services.store, services.run.run_id)
    if not any(manifest.run_id == services.run.run_id for manifest in chain):
        log_run_description(services)
    services.leg_time.load_history(chain)
    track_missed(chain, services)
    chain = chain or [commit_iteration_zero(services)]
    track_receipt(chain[-1].iteration, recover(chain, services), services)
    services.iteration_began_at = time.monotonic()
    return chain[-1]


def log_run_description(services: Services) -> None:
    """Send the run's config and, for a fork, its parent to the tracker."""
    with services.tracker.dropping_errors():
        services.tracker.log_params(flat_config(services.config))
        services.tracker.log_artifact("config.json", services.config.model_dump_json(indent=1).encode())
        for ancestor in lineage(services.store, services.config)[:1]:
            services.tracker.set_tags({"roll.forked_from": f"{ancestor.run_id}@{ancestor.iteration}"})
            services.tracker.log_artifact("fork.txt", "\n".join(ancestor.changes).encode())


def commit_iteration_zero(services: Services) -> Manifest:
    """Commit iteration 0: the policy that training starts from, after any warm start, evaluated and checkpointed."""
    start = Updated(iteration=0, weights_version=0) if services.config.warm_start is None else warm_start(services)
    published = publish(start, services)
    evaluated = evaluate(start, services)
    saving = checkpoint(start, published, services)
    track_receipt(0, store_checkpoint(services), services)
    return commit(None, IterationReceipts(None, None, start, published, evaluated, saving), services)


def next_request(manifest: Manifest, config: RunConfig) -> CollectRequest:
    """Return the collect request that follows a manifest. It is a pure function of it: every leg makes the same request."""
    return CollectRequest(
        iteration=manifest.iteration + 1,
        parent=record_digest(manifest),
        weights_version=manifest.weights_version,
        first_problem=manifest.next_problem,
        num_groups=config.rollout.num_groups,
    )


def is_due(updated: Updated, every: int, config: RunConfig) -> bool:
    """True if a periodic stage is due: every `every` iterations, and after the run's last iteration."""
    return updated.iteration % every == 0 or updated.iteration == config.iterations


def run_leg_flow(run: RunRef, leg: int, allocation: LegAllocation) -> LegEnded:
    """Run the train_leg flow and return how the leg ended. Exceptions become a LegEnded too."""
    try:
        return train_with_restarts(run, leg, allocation, run_dir(run, read_config(run)) / STAGE_CACHE)
    except (TransportError, HTTPStatusError) as error:
        # Prefect's server is gone or overloaded. If the run is finished, only the flow's final state was not reported.
        return finished_leg(run, leg) or leg_failed(run, leg, error)
    except Exception as error:
        with contextlib.suppress(OSError):  # a full disk under the leg's log
            traceback.print_exc()  # LegEnded holds one line; the leg's log has the traceback
        return leg_failed(run, leg, error)
    finally:
        exit_soon(exit_code=0)


def train_with_restarts(run: RunRef, leg: int, allocation: LegAllocation, stage_cache: Path) -> LegEnded:
    """Run the train_leg flow, and run it again with new roles if a role died in a SLURM allocation.

    A restart saves the wait for another allocation. If nothing was committed since the last start, the error is raised: this
    allocation would not get further, and the next leg may get other nodes.
    """
    while True:
        num_committed = len(read_chain(store_of(run), run.run_id))
        try:
            return train_leg.with_options(result_storage=stage_cache)(run, leg, allocation)
        except RoleDied as error:
            if allocation.ray_address is None or len(read_chain(store_of(run), run.run_id)) == num_committed:
                raise
            log.warning("leg %d: %s; its roles are started again", leg, error)
            time.sleep(DEAD_NODE_NOTICE_S)


def finished_leg(run: RunRef, leg: int) -> LegEnded | None:
    """FINISHED LegEnded if the run's last iteration is committed, else None."""
    chain = read_chain(store_of(run), run.run_id)
    if not chain or chain[-1].iteration < read_config(run).iterations:
        return None
    return LegEnded(run_id=run.run_id, leg=leg, ending=LegEnding.FINISHED, last_iteration=chain[-1].iteration)
