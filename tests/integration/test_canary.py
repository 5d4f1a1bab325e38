"""Canary checks of nodes before roles start: in a leg whose node is unfit, and on a Ray cluster of two nodes."""

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from roll_core.config.operations.legs import NodesConfig
from roll_core.config.operations.placement import ClusterConfig
from roll_core.errors import NodeUnfit
from roll_core.roles.canary import CanaryRequest, ask_nodes, check_nodes, try_all_reduce
from roll_core.roles.process import node_name
from roll_core.store.records.nodes import read_failures
from roll_core.types.leg import LegEnding
from tests.integration.conftest import REHEARSED, Workspace
from tests.support import ROOT

TWO_NODES = ClusterConfig(nodes=2)
FIT = NodesConfig(free_gigabytes=1e-3)


def test_a_leg_on_an_unfit_node_ends_with_its_name_and_the_failure_is_recorded(workspace: Workspace):
    ended = workspace.run_leg(workspace.open(*REHEARSED, "nodes.free_gigabytes=1e9"))
    assert ended.ending is not LegEnding.FINISHED
    assert f"node {node_name()}: " in ended.cause
    [(node, [failure])] = read_failures(workspace.store).items()
    assert (node, failure.run_id, failure.leg) == (node_name(), "tiny-1", 1)
    assert "(nodes.free_gigabytes asks for 1e+09)" in failure.reason
    assert not ray.is_initialized(), "a fleet that did not start is still connected to Ray"


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    cluster = Cluster()
    try:
        for _ in range(TWO_NODES.nodes):
            cluster.add_node(num_cpus=1, include_dashboard=False)
        ray.init(
            cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "SLURMD_NODENAME": "n"}}
        )
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_two_nodes_that_meet_are_fit(two_nodes, tmp_path: Path):
    check_nodes(TWO_NODES, FIT, tmp_path)


def test_a_node_is_named_as_its_launcher_knows_it(two_nodes, tmp_path: Path):
    with pytest.raises(NodeUnfit, match=f"^node n: {tmp_path} has "):
        check_nodes(TWO_NODES, NodesConfig(free_gigabytes=1e9), tmp_path)


def test_a_node_without_the_gpus_it_should_have_is_unfit(two_nodes, tmp_path: Path):
    unfit, members = ask_nodes(CanaryRequest((tmp_path,), 1e-3, num_gpus=1), FIT)
    assert members == []
    assert list(unfit.values()) == [["Ray sees 0 GPUs, cluster.devices_per_node asks for 1"]], "both are on this host"


def test_a_collective_that_cannot_begin_says_so(two_nodes, tmp_path: Path):
    _, [first, second] = ask_nodes(CanaryRequest((tmp_path,), 1e-3, num_gpus=0), FIT)
    with socket.create_server(("", 0)) as taken:
        host = first.rendezvous_address.rpartition(":")[0]
        nowhere = dataclasses.replace(first, rendezvous_address=f"{host}:{taken.getsockname()[1]}")
        assert try_all_reduce([nowhere, second], "gloo", 1.0) != ""
    assert try_all_reduce([first, second], "gloo", 60.0) == ""
