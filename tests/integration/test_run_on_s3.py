"""A whole run whose store is a real S3 server: through an outage of the server and a killed trainer."""

import os
import signal

from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import read_chain
from tests.integration.conftest import REHEARSED, settings
from tests.support import patience, wait_until


def test_a_run_on_s3_survives_an_outage_of_the_store_and_a_killed_trainer(workspace, own_server):
    workspace.environment |= own_server.environment
    uri = own_server.new_store_uri()
    store = ObjectStore(uri)

    def has_reached(iteration: int) -> bool:
        return len(read_chain(store, "tiny-1")) > iteration

    overrides = (*REHEARSED, f"store.uri={uri}", "iterations=12", "checkpoint.every=5")
    process = workspace.start("run", str(workspace.config), *settings(*overrides))
    wait_until(lambda: has_reached(2), "iteration 2 is committed")
    own_server.kill()
    own_server.start()
    wait_until(lambda: has_reached(6), "iteration 6 is committed")
    os.kill(workspace.pid_of("trainer rank 0"), signal.SIGKILL)
    output, _ = process.communicate(timeout=patience(400))
    assert process.returncode == 0, output
    chain = read_chain(store, "tiny-1")
    assert [m.iteration for m in chain] == list(range(13))
    assert {m.leg for m in chain} == {1, 2}
    assert [m.weights_digest for m in chain] == [
        m.weights_digest for m in workspace.train(*REHEARSED, "iterations=12", "checkpoint.every=5")
    ], "the run differs from an unbroken one in a folder"
