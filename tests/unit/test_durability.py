"""What Prefect remembers of the task runs of a leg."""

import weakref
from types import SimpleNamespace

from tasks import durability
from tasks.durability import forget_dead_results
from tests.stored_runs import bare_manifest


def test_results_that_no_longer_exist_are_forgotten_and_others_stay(monkeypatch):
    """Prefect keeps (state, type, weak reference to the result) by the id of the result; some results have no reference."""
    living = bare_manifest(2)
    results = {
        1: ("state", "task run", weakref.ref(bare_manifest(1))),
        2: ("state", "task run", weakref.ref(living)),
        3: ("state", "task run", None),
    }
    monkeypatch.setattr(durability.FlowRunContext, "get", lambda: SimpleNamespace(run_results=results))
    forget_dead_results()
    assert list(results) == [2, 3]


def test_outside_a_flow_there_is_nothing_to_forget():
    forget_dead_results()
