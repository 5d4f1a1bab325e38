"""Ray cluster of a leg: one that already runs on all of its nodes, or one that is started on this machine."""

import atexit
import contextlib
import functools
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray._private.services as ray_services

from roll_core.config.operations.placement import ELASTIC_RESOURCE, ClusterConfig, DeviceKind, leg_resources
from roll_core.errors import DeadlineExceeded, one_line
from roll_core.host import PRIVATE, atomic_replace
from roll_core.roles.process import role_environment

NODE_TIMEOUT = "timed out during startup"
"""Part of Ray's message when its node did not register in time."""
LOOPBACK = "127.0.0.1"
"""Address of a cluster that is started on this machine: other machines cannot reach it."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def connect_ray(cluster: ClusterConfig, address: str | None, deadline_s: float) -> None:
    """Connect this process to Ray, until `ray.shutdown`. `address` is that of a cluster whose head is on this machine; None
    starts a cluster here."""
    if address is not None:
        _connect(address, cluster.nodes, deadline_s)
        return
    with _with_environment(role_environment() | _authentication(_token_file())):
        _read_environment_again()
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
    """Start Ray on this machine, with the devices of all nodes of the config, reachable from this machine alone."""
    ray_services.resolve_ip_for_localhost = _unchanged
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
        _node_ip_address=LOOPBACK,
        _system_config={
            # Ray's default of 15 starves roles on a machine that does anything else: seen to slow training thirtyfold.
            "worker_niceness": 0,
            # No record of every call, which Ray's head would keep in memory: 50 kB an iteration.
            "task_events_report_interval_ms": 0,
        },
        _node_name=socket.gethostname(),
        **_QUIET,
    )


def _read_environment_again() -> None:
    """Let Ray read its mode of authentication and its token again. It read them when it was imported or last used."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _unchanged(address: str) -> str:
    """Replacement of Ray's function that turns the loopback address into one that other machines reach. Ray has no setting
    for it."""
    return address


@functools.cache
def _token_file() -> Path:
    """Path of the Ray token of the clusters that this process starts, readable by its owner alone. Ray's own default, a file
    under ~/.ray, is readable by everybody, and who has the token may run code as this user."""
    folder = Path(tempfile.mkdtemp(prefix="roll-ray-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with atomic_replace(folder / "token", PRIVATE) as file:
        file.write(secrets.token_hex(32).encode())
    return folder / "token"


def _authentication(token_file: Path) -> dict[str, str]:
    """Environment by which Ray requires a token, whatever the user's own environment says."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


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
