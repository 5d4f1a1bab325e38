"""Exports in the store: a policy as a Hugging Face folder, and a record created after the last file is stored.

    runs/quickstart-3/exports/00000040-77d0c2a94e1b.json

As with checkpoints, a record counts only if its weights digest is that of the committed manifest.
"""

from roll_core.errors import UserError
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_of
from roll_core.store.records.listing import ITERATION_AND_DIGEST, list_matching
from roll_core.store.records.runs import read_chain, read_config, store_of
from roll_core.store.records.sealed import create_record, read_record, read_records
from roll_core.types.manifest import Manifest
from roll_core.types.refs import ExportRef, RunRef


def record_export(store: ObjectStore, run_id: str, export: ExportRef) -> None:
    """Record a stored export, which makes it visible. If an earlier leg has recorded it, that record stays."""
    create_record(store, _record_name(run_id, export.iteration, export.weights_digest), export)


def find_export(store: ObjectStore, manifest: Manifest) -> ExportRef | None:
    """Find the export of the policy after a manifest's iteration; None if there is none."""
    try:
        return read_record(store, _record_name(manifest.run_id, manifest.iteration, manifest.weights_digest), ExportRef)
    except FileNotFoundError:
        return None


def is_finished(run: RunRef) -> bool:
    """True if a run has nothing left to do: its last iteration is committed, with its checkpoint and the export that
    `checkpoint.export_at_end` asks for."""
    store, config = store_of(run), read_config(run)
    chain = read_chain(store, run.run_id)
    if not chain or chain[-1].iteration < config.iterations or not checkpoints_of(store, chain[-1:]):
        return False
    return not config.checkpoint.export_at_end or find_export(store, chain[-1]) is not None


def manifest_to_export(store: ObjectStore, run_id: str, iteration: int | None) -> Manifest:
    """Return the manifest of an iteration whose policy can be exported: it has a checkpoint or an export.

    `iteration` None means the newest checkpoint. Raises UserError if no such manifest exists.
    """
    chain = read_chain(store, run_id)
    there = [checkpoint.iteration for checkpoint in checkpoints_of(store, chain)]
    if iteration is None and there:
        return chain[there[-1]]
    if iteration is not None and iteration < len(chain) and (iteration in there or find_export(store, chain[iteration])):
        return chain[iteration]
    which = "" if iteration is None else f" of iteration {iteration}"
    raise UserError(f"RUN@ITERATION: {run_id} has no checkpoint{which}; it has {there[-8:]}")


def read_exports(store: ObjectStore, run_id: str) -> list[ExportRef]:
    """Read all export records of a run, sorted by iteration."""
    folder = f"runs/{run_id}/exports"
    names = [f"{folder}/{name}" for name in list_matching(store, folder, ITERATION_AND_DIGEST)]
    return [export for export in read_records(store, names, ExportRef) if export is not None]


def _record_name(run_id: str, iteration: int, weights_digest: str) -> str:
    return f"runs/{run_id}/exports/{iteration:08d}-{weights_digest[:12]}.json"
