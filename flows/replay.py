"""Flow `replay`: replay the update of a committed iteration on roles of its own (`roll replay`).

It serves as a debugger, and as a cheap test of a library upgrade.
"""

import tempfile
from pathlib import Path

from prefect import flow

from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import check_has_update, find_run, read_chain, read_config
from roll_core.types.manifest import Replayed
from tasks.replay import replay as replay_task


@flow(name="replay", flow_run_name="replay {run_id}@{iteration}")
def replay(run_id: str, iteration: int, store: str) -> Replayed:
    """Replay the update of an iteration and compare the result with what was committed. Writes nothing into the store,
    except a marker if a checkpoint is damaged."""
    from roll_core.roles.fleet import Fleet

    object_store = ObjectStore(store)
    run, chain = find_run(object_store, run_id), read_chain(object_store, run_id)
    check_has_update(chain, run_id, iteration)
    with tempfile.TemporaryDirectory(prefix="roll-replay-") as folder:
        leg_dir = Path(folder) / "leg"
        leg_dir.mkdir()
        with Fleet(run, read_config(run).without_engines, leg_dir) as fleet:
            return replay_task(chain, iteration, object_store, fleet)
