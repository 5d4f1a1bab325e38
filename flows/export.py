"""Flow `export`: write the policy of a checkpoint as a Hugging Face folder (`roll export`). It starts roles of its own."""

import tempfile
from pathlib import Path

from prefect import flow

from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, read_chain, read_config
from roll_core.types.manifest import Receipt
from tasks.export import write_export


@flow(name="export", flow_run_name="export {run_id}@{iteration}")
def export(run_id: str, iteration: int, store: str, folder: str) -> Receipt:
    """Export a run's policy after an iteration that has a checkpoint, into a folder. Writes nothing into the store."""
    from roll_core.roles.fleet import Fleet

    object_store = ObjectStore(store)
    run, chain = find_run(object_store, run_id), read_chain(object_store, run_id)
    with tempfile.TemporaryDirectory(prefix="roll-export-") as scratch:
        leg_dir = Path(scratch) / "leg"
        leg_dir.mkdir()
        with Fleet(run, read_config(run).without_engines, leg_dir) as fleet:
            return write_export(chain[: iteration + 1], object_store, Path(folder), fleet)
