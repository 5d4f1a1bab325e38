"""The inner flow: one leg, one Ray cluster, one iteration after another until the run is done or the leg is."""

import logging
import shutil
import time
import traceback
from pathlib import Path

from httpx import TransportError
from prefect import flow

from flows.prefect_server import leave_soon
from roll_core.config.run import RunConfig, flat_config
from roll_core.errors import ArtifactDamaged, RoleDied
from roll_core.store.records.forks import lineage
from roll_core.store.records.runs import read_chain, read_config, store_of
from roll_core.tracking.spool import RunStatus
from roll_core.types.leg import LegAllocation, LegEnded, LegEnding
from roll_core.types.manifest import CollectRequest, Manifest, Updated
from roll_core.types.refs import RunRef, record_digest
from tasks.commit import IterationReceipts, commit
from tasks.export import store_export
from tasks.legs import leg_failed
from tasks.recover import recover
from tasks.services import Services, open_services, run_dir
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
from tasks.tracking import catch_up

RAY_NOTICES_S = 30.0
"""A node whose Ray died is known to be gone after so long, and roles are not started there by mistake: Ray asks five times,
three seconds apart, and may wait for each answer."""

log = logging.getLogger(__name__)


@flow(name="train_leg", flow_run_name="{run.run_id} leg {leg}")
def train_leg(run: RunRef, leg: int, place: LegAllocation) -> LegEnded:
    """manifest(n+1) = iterate(manifest(n)), until the last, or until the leg's time is up."""
    with open_services(run, leg, place) as services:
        manifest = begin_or_recover(services)
        ending = LegEnding.FINISHED
        while manifest.iteration < services.config.iterations:
            if (over := services.leg_time.is_over(services.fleet.checkpoint_s)) is not None:
                ending = over
                break
            manifest = iterate(manifest, services)
            services.leg_time.iterated(manifest)
        wind_up(manifest, ending, services)
    return LegEnded(run_id=run.run_id, leg=leg, ending=ending, last_iteration=manifest.iteration)


def wind_up(manifest: Manifest, ending: LegEnding, services: Services) -> None:
    """Nothing is left to do again: a leg that is asked to stop leaves a checkpoint of where it stopped."""
    if ending is not LegEnding.FINISHED:
        checkpoint_committed(manifest, services)
    store_checkpoint(services)
    if ending is LegEnding.FINISHED:
        if services.config.checkpoint.export_at_end:
            store_export(manifest, services)
        services.tracker.end(RunStatus.FINISHED)


def iterate(manifest: Manifest, services: Services) -> Manifest:
    """One iteration, from the manifest before it to its own."""
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
    """The last manifest of the run, with every role brought to its policy. A new run shows here that it can be resumed."""
    chain = read_chain(services.store, services.run.run_id)
    if not any(manifest.run_id == services.run.run_id for manifest in chain):
        introduce(services)
    services.leg_time.begin(chain)
    catch_up(chain, services)
    chain = chain or [begin(services)]
    recover(chain, services)
    return chain[-1]


def introduce(services: Services) -> None:
    """Tell the tracker what this run is, and whom it descends from."""
    services.tracker.log_params(flat_config(services.config))
    services.tracker.log_artifact("config.json", services.config.model_dump_json(indent=1).encode())
    for ancestor in lineage(services.store, services.config)[:1]:
        services.tracker.set_tags({"roll.forked_from": f"{ancestor.run_id}@{ancestor.iteration}"})
        services.tracker.log_artifact("fork.txt", "\n".join(ancestor.changes).encode())


def begin(services: Services) -> Manifest:
    """Iteration 0: the policy training starts from, evaluated and checkpointed."""
    start = Updated(iteration=0, weights_version=0) if services.config.warm_start is None else warm_start(services)
    published = publish(start, services)
    evaluated = evaluate(start, services)
    saving = checkpoint(start, published, services)
    store_checkpoint(services)
    return commit(None, IterationReceipts(None, None, start, published, evaluated, saving), services)


def next_request(manifest: Manifest, config: RunConfig) -> CollectRequest:
    """What to collect after a manifest: a pure function of it, so that every leg asks for the same."""
    return CollectRequest(
        iteration=manifest.iteration + 1,
        parent=record_digest(manifest),
        weights_version=manifest.weights_version,
        first_problem=manifest.next_problem,
        num_groups=config.rollout.num_groups,
    )


def is_due(updated: Updated, every: int, config: RunConfig) -> bool:
    """Every k iterations, and at the last."""
    return updated.iteration % every == 0 or updated.iteration == config.iterations


def answer_of_leg(run: RunRef, leg: int, place: LegAllocation) -> LegEnded:
    """How a leg ended, by the Prefect server that is set: the flow's answer; failures become one, too."""
    scratch = run_dir(run, read_config(run))
    if not any(manifest.run_id == run.run_id for manifest in read_chain(store_of(run), run.run_id)):
        # Scratch of a run of the same name in another store, or in one since deleted.
        for folder in ("stage-cache", "spool"):
            shutil.rmtree(scratch / folder, ignore_errors=True)
    try:
        return train_on(run, leg, place, scratch / "stage-cache")
    except TransportError as error:
        # Of Prefect's client. If the body of the flow came to its end, all that is missing is that the server knows.
        return finished_leg(run, leg) or leg_failed(run, leg, error)
    except Exception as error:
        traceback.print_exc()  # the answer is one line; the leg's log has the rest
        if isinstance(error, ArtifactDamaged):
            # A kept answer may name rollouts that were collected as garbage before they were committed: make it again.
            shutil.rmtree(scratch / "stage-cache", ignore_errors=True)
        return leg_failed(run, leg, error)
    finally:
        leave_soon(exit_code=0)


def train_on(run: RunRef, leg: int, place: LegAllocation, stage_cache: Path) -> LegEnded:
    """The flow; and again, with new roles, where one died in an allocation that has to be waited for and is still there.

    Whoever has committed nothing since the last time would not get further by that: the next leg may have other machines.
    """
    while True:
        num_committed = len(read_chain(store_of(run), run.run_id))
        try:
            return train_leg.with_options(result_storage=stage_cache)(run, leg, place)
        except RoleDied as error:
            if place.ray_address is None or len(read_chain(store_of(run), run.run_id)) == num_committed:
                raise
            log.warning("leg %d: %s; its roles are started again", leg, error)
            time.sleep(RAY_NOTICES_S)


def finished_leg(run: RunRef, leg: int) -> LegEnded | None:
    """The answer of a leg that has nothing left to do, if it has not."""
    chain = read_chain(store_of(run), run.run_id)
    if not chain or chain[-1].iteration < read_config(run).iterations:
        return None
    return LegEnded(run_id=run.run_id, leg=leg, ending=LegEnding.FINISHED, last_iteration=chain[-1].iteration)
