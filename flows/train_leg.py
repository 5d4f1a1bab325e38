"""The inner flow: one leg, one Ray cluster, one iteration after another until the run is done or the leg is."""

import os
import select
import shutil
import signal
import threading
import traceback
from typing import Any

from httpx import TransportError
from prefect import flow
from prefect.context import hydrated_context

from flows.control_plane import leave_soon
from roll_core.config.run import RunConfig, flat_config
from roll_core.errors import ArtifactDamaged
from roll_core.store.fork import lineage
from roll_core.store.runs import read_chain, read_config, store_of
from roll_core.tracking.spool import RunStatus
from roll_core.types.manifest import CollectRequest, LegEnded, Manifest, Updated
from roll_core.types.refs import RunRef, record_digest
from tasks.checkpoint import checkpoint, store_checkpoint
from tasks.collect import collect
from tasks.commit import Iteration, commit
from tasks.evaluate import evaluate
from tasks.export import store_export
from tasks.legs import leg_failed
from tasks.prepare import prepare
from tasks.publish import publish
from tasks.recover import recover
from tasks.services import Services, open_services, run_dir
from tasks.tracking import catch_up
from tasks.update import update, update_critic, warm_start


@flow(name="train_leg", flow_run_name="{run.run_id} leg {leg}")
def train_leg(run: RunRef, leg: int) -> LegEnded:
    """manifest(n+1) = iterate(manifest(n)), until the last."""
    with open_services(run, leg) as services:
        manifest = begin_or_recover(services)
        while manifest.iteration < services.config.iterations:
            manifest = iterate(manifest, services)
        store_checkpoint(services)
        if services.config.checkpoint.export_at_end:
            store_export(manifest, services)
        services.tracker.end(RunStatus.FINISHED)
    return LegEnded(run_id=run.run_id, leg=leg, last_iteration=manifest.iteration, finished=True, fenced=False, cause="")


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
    return commit(manifest, Iteration(prepared, critic_updated, updated, published, evaluated, saving), services)


def begin_or_recover(services: Services) -> Manifest:
    """The last manifest of the run, with every role brought to its policy. A new run shows here that it can be resumed."""
    chain = read_chain(services.store, services.run.run_id)
    if not any(manifest.run_id == services.run.run_id for manifest in chain):
        introduce(services)
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
    return commit(None, Iteration(None, None, start, published, evaluated, saving), services)


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


def run_train_leg(run: RunRef, leg: int, context: dict[str, Any], launcher_pid: int) -> LegEnded:
    """What a leg's process runs: the flow, as a child of the flow that launched it; failures become an answer."""
    die_with(launcher_pid)
    scratch = run_dir(run, read_config(run))
    if not any(manifest.run_id == run.run_id for manifest in read_chain(store_of(run), run.run_id)):
        # Scratch of a run of the same name in another store, or in one since deleted.
        for folder in ("stage-cache", "spool"):
            shutil.rmtree(scratch / folder, ignore_errors=True)
    with hydrated_context(context):
        try:
            return train_leg.with_options(result_storage=scratch / "stage-cache")(run, leg)
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


def finished_leg(run: RunRef, leg: int) -> LegEnded | None:
    """The answer of a leg that has nothing left to do, if it has not."""
    chain = read_chain(store_of(run), run.run_id)
    if not chain or chain[-1].iteration < read_config(run).iterations:
        return None
    return LegEnded(run_id=run.run_id, leg=leg, last_iteration=chain[-1].iteration, finished=True, fenced=False, cause="")


def die_with(launcher_pid: int) -> None:
    """A local leg has no allocation to outlive its launcher in: when that process is gone, so is the leg."""
    launcher = os.pidfd_open(launcher_pid)

    def watch() -> None:
        select.select([launcher], [], [])  # readable once it has ended, even while nobody has reaped it
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()
