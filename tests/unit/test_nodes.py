"""Node failures: recorded for all runs, excluding a node for a while, cleared by a user; and the checks of the canary."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flows.cli import main
from roll_core.config.operations.legs import NodesConfig
from roll_core.config.operations.placement import ClusterConfig
from roll_core.errors import FailureClass, NodeUnfit, classify
from roll_core.roles.canary import (
    CanaryRequest,
    CollectiveMember,
    check_nodes,
    clock_faults,
    disk_faults,
    unreachable_nodes,
)
from roll_core.roles.process import node_name
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.nodes import NodeFailure, clear_failures, excluded_nodes, read_failures, record_failure

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
POLICY = NodesConfig(failures=2, window_hours=24)


def failure(node: str, hours_ago: float = 0.0, reason: str = "disk full", now: datetime = NOON) -> NodeFailure:
    return NodeFailure(node=node, reason=reason, run_id="tiny-1", leg=2, at=now - timedelta(hours=hours_ago))


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store")


def test_a_node_is_excluded_from_its_second_failure_until_one_of_them_is_a_day_old(store):
    record_failure(store, failure("gpu-1", hours_ago=20))
    record_failure(store, failure("gpu-2", hours_ago=1))
    assert excluded_nodes(store, POLICY, NOON) == ()
    record_failure(store, failure("gpu-1", hours_ago=2))
    assert excluded_nodes(store, POLICY, NOON) == ("gpu-1",)
    assert excluded_nodes(store, POLICY, NOON + timedelta(hours=3.9)) == ("gpu-1",)
    assert excluded_nodes(store, POLICY, NOON + timedelta(hours=4)) == (), "the first one is 24 hours old"
    assert excluded_nodes(store, NodesConfig(failures=1), NOON) == ("gpu-1", "gpu-2")


def test_failures_that_several_writers_record_at_once_are_all_kept(store):
    with ThreadPoolExecutor(16) as writers:
        list(writers.map(lambda n: record_failure(store, failure("gpu-1", reason=f"writer {n}")), range(64)))
    [(node, failures)] = read_failures(store).items()
    assert node == "gpu-1"
    assert {f.reason for f in failures} == {f"writer {n}" for n in range(64)}


def test_clearing_forgets_the_failures_of_one_node_and_later_ones_count_again(store):
    for node in ("gpu-1", "gpu-1", "fe80::1%eth0/x", "fe80::1%eth0/x"):
        record_failure(store, failure(node))
    assert excluded_nodes(store, POLICY, NOON) == ("fe80::1%eth0/x", "gpu-1"), "whatever a node is called"
    assert clear_failures(store, ["gpu-1"]) == 2
    assert excluded_nodes(store, POLICY, NOON) == ("fe80::1%eth0/x",)
    record_failure(store, failure("gpu-1"))
    assert [len(failures) for failures in read_failures(store).values()] == [2, 1]


def test_a_month_later_a_failure_is_forgotten(store):
    record_failure(store, failure("gpu-1", hours_ago=31 * 24, reason="old"))
    record_failure(store, failure("gpu-1", hours_ago=29 * 24, reason="younger"))
    record_failure(store, failure("gpu-1", reason="new"))
    assert [f.reason for f in read_failures(store)["gpu-1"]] == ["younger", "new"]


def test_roll_nodes_shows_and_clears(store, capsys):
    assert main(["nodes", "--store", store.uri]) == 0
    assert capsys.readouterr().out == f"no failures of nodes in {store.uri}\n"
    now = datetime.now(UTC)
    for node in ("gpu-1", "gpu-1", "gpu-2"):
        record_failure(store, failure(node, hours_ago=1, now=now))
    main(["nodes", "--store", store.uri])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=1) == ["gpu-1", "2 failures, left out (2 or more in 24 hours)"]
    assert lines[1].endswith("  tiny-1 leg 2: disk full")
    assert lines[3].split(maxsplit=1) == ["gpu-2", "1 failures, in use"]
    assert main(["nodes", "--store", store.uri, "--clear", "gpu-3"]) == 2
    assert "nothing is known of gpu-3; known nodes: gpu-1, gpu-2" in capsys.readouterr().err
    assert main(["nodes", "--store", store.uri, "--clear", "gpu-1"]) == 0
    assert list(read_failures(store)) == ["gpu-2"]


def test_a_disk_that_is_full_or_cannot_be_written_to_is_named(tmp_path):
    assert disk_faults(CanaryRequest((tmp_path,), 1e-9, 0)) == []
    assert list(tmp_path.iterdir()) == [], "nothing is left of the probe"
    [full] = disk_faults(CanaryRequest((tmp_path,), 1e9, 0))
    assert full.startswith(f"{tmp_path} has ")
    assert full.endswith("(nodes.free_gigabytes asks for 1e+09)")
    file = tmp_path / "file"
    file.touch()
    assert disk_faults(CanaryRequest((file,), 1e-9, 0)) == [f"{file} cannot be written to (Not a directory)"]


def test_a_clock_may_show_any_time_between_request_and_reply():
    sent_at, received_at = 1000.0, 1010.0
    assert clock_faults(sent_at, received_at, 1003.0, 30.0) == []
    assert clock_faults(sent_at, received_at, 1040.0, 30.0) == []
    assert clock_faults(sent_at, received_at, 1041.0, 30.0) == ["its clock is off by 31 s (nodes.clock_seconds allows 30)"]
    assert clock_faults(sent_at, received_at, 900.0, 30.0) == ["its clock is off by 100 s (nodes.clock_seconds allows 30)"]


@pytest.mark.parametrize(
    ("broken", "blamed"),
    [
        (set(), []),
        ({"c"}, ["c"]),
        ({"a"}, ["a"]),
        ({"b", "c"}, ["b", "c"]),
    ],
)
def test_the_node_that_breaks_a_collective_is_found_in_pairs(broken, blamed):
    members = [CollectiveMember(name, "", {}) for name in "abcd"]
    found = unreachable_nodes(members, lambda some: "timed out" if broken & {m.node for m in some} else "")
    assert sorted(found) == blamed
    assert all(faults == ["collective: timed out"] for faults in found.values())


def test_two_nodes_that_cannot_reach_each_other_are_both_named():
    assert sorted(
        unreachable_nodes([CollectiveMember("a", "", {}), CollectiveMember("b", "", {})], lambda _: "timed out")
    ) == ["a", "b"]


def test_a_single_machine_with_a_full_disk_is_unfit_and_named(tmp_path):
    laptop = ClusterConfig()
    check_nodes(laptop, NodesConfig(free_gigabytes=1e-9), tmp_path)
    with pytest.raises(NodeUnfit, match=f"^node {node_name()}: {tmp_path} has ") as caught:
        check_nodes(laptop, NodesConfig(free_gigabytes=1e9), tmp_path)
    assert classify(caught.value) is FailureClass.TRANSIENT, "the next leg may be elsewhere"
    assert list(caught.value.reasons) == [node_name()]
