"""The update of one committed iteration again, on roles of its own: a debugger, and a cheap test of a version bump."""

import tempfile
from pathlib import Path

from prefect import flow

from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, read_chain, read_config, refuse_unless_learned
from roll_core.types.manifest import Replayed
from tasks.replay import replay as replay_task


@flow(name="replay", flow_run_name="replay {run_id}@{iteration}")
def replay(run_id: str, iteration: int, store: str) -> Replayed:
    """Compare what an update gives today with what was committed. Writes nothing into the store."""
    from roll_core.roles.fleet import Fleet

    there = ObjectStore(store)
    run, chain = find_run(there, run_id), read_chain(there, run_id)
    refuse_unless_learned(chain, run_id, iteration)
    with tempfile.TemporaryDirectory(prefix="roll-replay-") as folder:
        leg_dir = Path(folder) / "leg"
        leg_dir.mkdir()
        with Fleet(run, read_config(run).to_learn_only, leg_dir) as fleet:
            return replay_task(chain, iteration, there, fleet)
