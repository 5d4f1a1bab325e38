"""Canary checks of every node, before roles start on it: folders are writable and have space, the clock is right, GPUs
compute, and an all-reduce reaches all nodes. A fault found here names the node; found later it would look like a late role.

The fleet calls `check_nodes` once Ray is up. A single CPU node only has its folders checked, in this process; else each node
runs a Ray task.
"""

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_core.config.operations.legs import NodesConfig
from roll_core.config.operations.placement import ClusterConfig, DeviceKind
from roll_core.errors import NodeUnfit, one_line
from roll_core.host import ANY_ADDRESS, free_port
from roll_core.roles.process import node_name
from roll_core.roles.ray_cluster import leg_nodes

GIGABYTE = 1e9
PROBE = b"roll" * 2**18
"""Bytes written to test a disk: one megabyte, enough to reach the disk and quick to write."""


@dataclass(frozen=True)
class CanaryRequest:
    """Requirements of a node: folders it can write to, free space in GB (1e9 bytes) in each, and number of GPUs."""

    folders: tuple[Path, ...]
    free_gigabytes: float
    num_gpus: int


@dataclass(frozen=True)
class CanaryReply:
    """Result of the checks that a node ran on itself."""

    node: str
    clock: float
    """Time on the node when the checks began, in seconds since the epoch."""
    faults: tuple[str, ...]
    rendezvous_address: str
    """Address where this node could host a process group. Example: tcp://10.0.0.7:41234"""


@dataclass(frozen=True)
class CollectiveMember:
    """Node that takes part in an all-reduce."""

    node: str
    rendezvous_address: str
    options: dict[str, object]
    """Ray options that run a task on this node."""


def check_nodes(cluster: ClusterConfig, nodes: NodesConfig, work_dir: Path) -> None:
    """Raise NodeUnfit if a node has a fault; the error names every unfit node and its faults."""
    on_gpu = cluster.device is DeviceKind.CUDA
    num_gpus = cluster.devices_per_node if on_gpu else 0
    request = CanaryRequest((work_dir, Path(tempfile.gettempdir())), nodes.free_gigabytes, num_gpus)
    if cluster.nodes == 1 and not on_gpu:
        unfit = {node_name(): faults} if (faults := disk_faults(request)) else {}
    else:
        unfit, members = ask_nodes(request, nodes)
        if not unfit and len(members) > 1:
            unfit = unreachable_nodes(
                members, lambda some: try_all_reduce(some, "nccl" if on_gpu else "gloo", nodes.canary_seconds)
            )
    if unfit:
        raise NodeUnfit({node: "; ".join(faults) for node, faults in sorted(unfit.items())})


def ask_nodes(request: CanaryRequest, nodes: NodesConfig) -> tuple[dict[str, list[str]], list[CollectiveMember]]:
    """Run the checks on all nodes of the leg; return the faults by node, and the nodes that replied."""
    asked_at = time.time()
    unfit: dict[str, list[str]] = {}
    pending = {}
    for node in leg_nodes():
        host, num_gpus = node["NodeName"], int(node["Resources"].get("GPU", 0))
        if num_gpus < request.num_gpus:
            unfit[host] = [f"Ray sees {num_gpus} GPUs, cluster.devices_per_node asks for {request.num_gpus}"]
            continue
        here = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False), "num_cpus": 0}
        task = ray.remote(examine_node).options(**here, num_gpus=request.num_gpus, max_retries=0)
        pending[task.remote(request)] = (host, here | {"num_gpus": min(1, request.num_gpus)})
    ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=nodes.canary_seconds) if pending else ([], [])
    replied_at = time.time()
    members = []
    for ref, (host, options) in pending.items():
        if ref not in ready:
            unfit[host] = [f"no answer within {nodes.canary_seconds:.0f} s (nodes.canary_seconds)"]
            continue
        try:
            reply: CanaryReply = ray.get(ref)
        except ray.exceptions.RayError as error:
            unfit[host] = [one_line(error)]
            continue
        faults = [*reply.faults, *clock_faults(asked_at, replied_at, reply.clock, nodes.clock_seconds)]
        if faults:
            unfit[reply.node] = faults
        members.append(CollectiveMember(reply.node, reply.rendezvous_address, options))
    return unfit, members


def examine_node(request: CanaryRequest) -> CanaryReply:
    """Check the node that this runs on. Runs as a Ray task."""
    clock = time.time()
    faults = (*disk_faults(request), *(gpu_faults(request.num_gpus) if request.num_gpus else ()))
    rendezvous_address = f"tcp://{ray.util.get_node_ip_address()}:{free_port(ANY_ADDRESS)}"
    return CanaryReply(node_name(), clock, tuple(faults), rendezvous_address)


def disk_faults(request: CanaryRequest) -> list[str]:
    """Return the faults of the folders: not writable, not read back as written, or too full."""
    faults = []
    for folder in request.folders:
        probe = folder / f".canary-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(PROBE)
            is_intact = probe.read_bytes() == PROBE
            probe.unlink()
            free = shutil.disk_usage(folder).free / GIGABYTE
        except OSError as error:
            faults.append(f"{folder} cannot be written to ({error.strerror})")
            continue
        if not is_intact:
            faults.append(f"{folder} gives back other bytes than were written")
        if free < request.free_gigabytes:
            faults.append(f"{folder} has {free:.1f} GB left (nodes.free_gigabytes asks for {request.free_gigabytes:g})")
    return faults


def clock_faults(asked_at: float, replied_at: float, clock: float, tolerance_s: float) -> list[str]:
    """Return the fault of a node's clock, if any. A right clock shows a time between request and reply, however long both
    took, give or take `tolerance_s` seconds."""
    off = max(asked_at - clock, clock - replied_at, 0.0)
    return [f"its clock is off by {off:.0f} s (nodes.clock_seconds allows {tolerance_s:g})"] if off > tolerance_s else []


def gpu_faults(num_gpus: int) -> list[str]:
    """Return the faults of this node's GPUs: missing, unusable, or computing wrong results."""
    import torch

    if torch.cuda.device_count() < num_gpus:
        return [f"{torch.cuda.device_count()} GPUs are visible, cluster.devices_per_node asks for {num_gpus}"]
    faults = []
    for gpu in range(num_gpus):
        try:
            ones = torch.ones(256, 256, device=f"cuda:{gpu}")
            total = float((ones @ ones).sum())  # 256 ** 3, exact in float32
        except RuntimeError as error:
            faults.append(f"GPU {gpu} cannot be used ({one_line(error)})")
            continue
        if total != 256**3:
            faults.append(f"GPU {gpu} computes {total} where {256**3} is right")
    return faults


def unreachable_nodes(
    members: Sequence[CollectiveMember], try_all_reduce: Callable[[Sequence[CollectiveMember]], str]
) -> dict[str, list[str]]:
    """Return the nodes that make an all-reduce fail, and why; `try_all_reduce` returns an error or an empty string.

    Each node is tried in a pair with the first node. The nodes whose pair fails are returned; only the first, if all pairs
    fail; all nodes, if no pair fails or there are only two nodes.
    """
    error = try_all_reduce(members)
    if not error:
        return {}
    first, others = members[0], members[1:]
    found = {other.node: reason for other in others if (reason := try_all_reduce([first, other]))} if len(others) > 1 else {}
    if found and len(found) == len(others):
        found = {first.node: error}
    return {node: [f"collective: {reason}"] for node, reason in (found or {m.node: error for m in members}).items()}


def try_all_reduce(members: Sequence[CollectiveMember], backend: str, deadline_s: float) -> str:
    """Run an all-reduce on these nodes; return the error in one line, or an empty string if it worked."""
    refs = [
        ray.remote(max_calls=1)(all_reduce)  # a process of its own: nothing of a collective is left behind
        .options(**member.options, max_retries=0)
        .remote(members[0].rendezvous_address, rank, len(members), backend, deadline_s)
        for rank, member in enumerate(members)
    ]
    try:
        ray.get(refs, timeout=2 * deadline_s)
    except (ray.exceptions.RayError, RuntimeError) as error:
        for ref in refs:
            ray.cancel(ref, force=True)
        return one_line(error)
    return ""


def all_reduce(rendezvous_address: str, rank: int, world_size: int, backend: str, deadline_s: float) -> None:
    """Sum ones over all nodes; raise RuntimeError if the sum is wrong. Runs as a Ray task on each node."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=rendezvous_address, rank=rank, world_size=world_size, timeout=timedelta(seconds=deadline_s)
    )
    try:
        ones = torch.ones(1024, device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(ones)
        if not bool((ones == world_size).all()):
            raise RuntimeError(f"{world_size} nodes added up to {float(ones.max())}")
    finally:
        dist.destroy_process_group()
