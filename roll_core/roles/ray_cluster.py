"""Ray cluster of a leg: one that already runs on all of its nodes, or one that is started on this machine."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray

from roll_core.config.operations.placement import ELASTIC_RESOURCE, ClusterConfig, DeviceKind, leg_resources
from roll_core.errors import DeadlineExceeded, one_line
from roll_core.roles.process import role_environment

NODE_TIMEOUT = "timed out during startup"
"""Part of Ray's message when its node did not register in time."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def connect_ray(cluster: ClusterConfig, address: str | None, deadline_s: float) -> None:
    """Connect this process to Ray, until `ray.shutdown`. `address` is that of a cluster whose head is on this machine; None
    starts a cluster here."""
    if address is not None:
        _connect(address, cluster.nodes, deadline_s)
        return
    with _with_environment(role_environment()):
        _start_within(cluster, deadline_s)


def _start_within(cluster: ClusterConfig, deadline_s: float) -> None:
    """Start Ray on this machine, again if a busy machine exceeds the 30 s that Ray gives its node to register."""
    ends_at = time.monotonic() + deadline_s
    while True:
        try:
            _start(cluster)
            return
        except Exception as error:  # Ray's timeout is a plain Exception
            if NODE_TIMEOUT not in str(error) or time.monotonic() > ends_at:
                raise
            ray.shutdown()


def _start(cluster: ClusterConfig) -> None:
    """Start Ray on this machine, with the devices of all nodes of the config."""
    ray.init(
        address="local",
        num_cpus=cluster.num_devices + 1,
        num_gpus=cluster.num_devices if cluster.device is DeviceKind.CUDA else 0,
        resources={
            name: amount
            for node in range(cluster.nodes)
            for name, amount in leg_resources(node, cluster.devices_per_node).items()
        },
        include_dashboard=False,
        # Ray's default of 15 starves roles on a machine that does anything else: seen to slow training thirtyfold.
        _system_config={"worker_niceness": 0},
        _node_name=socket.gethostname(),
        **_QUIET,
    )


def leg_nodes() -> list[dict[str, Any]]:
    """Live nodes of the leg, as Ray describes them, without elastic nodes."""
    return [node for node in _alive_nodes() if ELASTIC_RESOURCE not in node["Resources"]]


def elastic_nodes() -> dict[str, int]:
    """Number of devices of each live elastic node, by Ray's node id."""
    found = {node["NodeID"]: int(node["Resources"].get(ELASTIC_RESOURCE, 0)) for node in _alive_nodes()}
    return {node: devices for node, devices in found.items() if devices}


def node_names() -> tuple[str, ...]:
    """Names of all machines that are alive in the leg's Ray cluster, elastic nodes included."""
    return tuple(sorted({node["NodeName"] for node in _alive_nodes()}))


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def raylet_pid() -> int:
    """Process id of the raylet of the node this process started; Ray has no public API for it."""
    return ray._private.worker._global_node.all_processes["raylet"][0].process.pid


def _connect(address: str, num_nodes: int, deadline_s: float) -> None:
    """Connect to a running cluster and wait until it has `num_nodes` nodes.

    The head accepts connections before its own node is registered, so connecting is retried. Other nodes register later.
    """
    ends_at = time.monotonic() + deadline_s
    here, missing = address.rpartition(":")[0], num_nodes
    while missing:
        try:
            ray.init(address=address, _node_ip_address=here, ignore_reinit_error=True, **_QUIET)
            missing = max(0, num_nodes - len(leg_nodes()))
            cause = f"{missing} of {num_nodes} nodes are missing"
        except (ConnectionError, RuntimeError, ValueError) as error:
            cause = one_line(error)
        if missing and time.monotonic() > ends_at:
            raise DeadlineExceeded(f"deadlines.start: Ray at {address}: {cause}")
        time.sleep(0.2 if missing else 0.0)


@contextlib.contextmanager
def _with_environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in this block, and for their children."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
