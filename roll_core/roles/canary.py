"""What every node of a leg is asked before roles start on it: can it write, is there room, is its clock right, do its GPUs
compute, does a collective reach the others? What is found here names the node; later it would be a role that is late.

Called by the fleet, once Ray is up. On a laptop that is a file written and removed, in this process; else a Ray task a node.
"""

import os
import shutil
import socket
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
from roll_core.roles.ray_cluster import leg_nodes

GIGABYTE = 1e9
PROBE = b"roll" * 2**18
"""A megabyte: enough to reach the disk, too little to wait for."""


@dataclass(frozen=True)
class CanaryRequest:
    folders: tuple[Path, ...]
    free_gigabytes: float
    num_gpus: int


@dataclass(frozen=True)
class CanaryReply:
    """What a node says of itself. `meeting_point` is where others could meet it: tcp://10.0.0.7:41234"""

    node: str
    clock: float
    troubles: tuple[str, ...]
    meeting_point: str


@dataclass(frozen=True)
class CollectiveMember:
    """A node in a collective."""

    node: str
    meeting_point: str
    options: dict[str, object]


def check_nodes(cluster: ClusterConfig, nodes: NodesConfig, work_dir: Path) -> None:
    """Raise NodeUnfit, which names every node that is not fit and why."""
    on_gpu = cluster.device is DeviceKind.CUDA
    num_gpus = cluster.devices_per_node if on_gpu else 0
    question = CanaryRequest((work_dir, Path(tempfile.gettempdir())), nodes.free_gigabytes, num_gpus)
    if cluster.nodes == 1 and not on_gpu:
        unfit = {node_name(): troubles} if (troubles := disk_troubles(question)) else {}
    else:
        unfit, members = ask_nodes(question, nodes)
        if not unfit and len(members) > 1:
            unfit = unmet(members, lambda some: meet(some, "nccl" if on_gpu else "gloo", nodes.canary_seconds))
    if unfit:
        raise NodeUnfit({node: "; ".join(troubles) for node, troubles in sorted(unfit.items())})


def node_name() -> str:
    """As the launcher knows it, which is not always the host's name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def ask_nodes(question: CanaryRequest, nodes: NodesConfig) -> tuple[dict[str, list[str]], list[CollectiveMember]]:
    """What is wrong, by node, and all that answered."""
    asked_at = time.time()
    unfit: dict[str, list[str]] = {}
    pending = {}
    for node in leg_nodes():
        host, num_gpus = node["NodeName"], int(node["Resources"].get("GPU", 0))
        if num_gpus < question.num_gpus:
            unfit[host] = [f"Ray sees {num_gpus} GPUs, cluster.devices_per_node asks for {question.num_gpus}"]
            continue
        here = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False), "num_cpus": 0}
        task = ray.remote(examine).options(**here, num_gpus=question.num_gpus, max_retries=0)
        pending[task.remote(question)] = (host, here | {"num_gpus": min(1, question.num_gpus)})
    ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=nodes.canary_seconds) if pending else ([], [])
    answered_at = time.time()
    members = []
    for ref, (host, options) in pending.items():
        if ref not in ready:
            unfit[host] = [f"no answer within {nodes.canary_seconds:.0f} s (nodes.canary_seconds)"]
            continue
        try:
            answer: CanaryReply = ray.get(ref)
        except ray.exceptions.RayError as error:
            unfit[host] = [one_line(error)]
            continue
        troubles = [*answer.troubles, *clock_troubles(asked_at, answered_at, answer.clock, nodes.clock_seconds)]
        if troubles:
            unfit[answer.node] = troubles
        members.append(CollectiveMember(answer.node, answer.meeting_point, options))
    return unfit, members


def examine(question: CanaryRequest) -> CanaryReply:
    """On the node itself."""
    clock = time.time()
    troubles = (*disk_troubles(question), *(gpu_troubles(question.num_gpus) if question.num_gpus else ()))
    meeting_point = f"tcp://{ray.util.get_node_ip_address()}:{free_port(ANY_ADDRESS)}"
    return CanaryReply(node_name(), clock, tuple(troubles), meeting_point)


def disk_troubles(question: CanaryRequest) -> list[str]:
    """Folders that cannot be written to, read back, or are all but full."""
    troubles = []
    for folder in question.folders:
        probe = folder / f".canary-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(PROBE)
            is_intact = probe.read_bytes() == PROBE
            probe.unlink()
            free = shutil.disk_usage(folder).free / GIGABYTE
        except OSError as error:
            troubles.append(f"{folder} cannot be written to ({error.strerror})")
            continue
        if not is_intact:
            troubles.append(f"{folder} gives back other bytes than were written")
        if free < question.free_gigabytes:
            troubles.append(f"{folder} has {free:.1f} GB left (nodes.free_gigabytes asks for {question.free_gigabytes:g})")
    return troubles


def clock_troubles(asked_at: float, answered_at: float, clock: float, tolerance_s: float) -> list[str]:
    """A clock is right if it says a time between question and answer, however long both took."""
    off = max(asked_at - clock, clock - answered_at, 0.0)
    return [f"its clock is off by {off:.0f} s (nodes.clock_seconds allows {tolerance_s:g})"] if off > tolerance_s else []


def gpu_troubles(num_gpus: int) -> list[str]:
    """GPUs that are not there, or do not compute what they should."""
    import torch

    if torch.cuda.device_count() < num_gpus:
        return [f"{torch.cuda.device_count()} GPUs are visible, cluster.devices_per_node asks for {num_gpus}"]
    troubles = []
    for gpu in range(num_gpus):
        try:
            ones = torch.ones(256, 256, device=f"cuda:{gpu}")
            total = float((ones @ ones).sum())  # 256 ** 3, exact in float32
        except RuntimeError as error:
            troubles.append(f"GPU {gpu} cannot be used ({one_line(error)})")
            continue
        if total != 256**3:
            troubles.append(f"GPU {gpu} computes {total} where {256**3} is right")
    return troubles


def unmet(members: Sequence[CollectiveMember], meet: Callable[[Sequence[CollectiveMember]], str]) -> dict[str, list[str]]:
    """Whom a collective of all fails for: whoever fails with the first alone; the first, if all do; all, if none does."""
    trouble = meet(members)
    if not trouble:
        return {}
    first, others = members[0], members[1:]
    found = {other.node: said for other in others if (said := meet([first, other]))} if len(others) > 1 else {}
    if found and len(found) == len(others):
        found = {first.node: trouble}
    return {node: [f"collective: {said}"] for node, said in (found or {m.node: trouble for m in members}).items()}


def meet(members: Sequence[CollectiveMember], backend: str, deadline_s: float) -> str:
    """An all-reduce among nodes; what went wrong with it, or nothing."""
    refs = [
        ray.remote(max_calls=1)(all_reduce)  # what a collective left in its process goes with it
        .options(**member.options, max_retries=0)
        .remote(members[0].meeting_point, rank, len(members), backend, deadline_s)
        for rank, member in enumerate(members)
    ]
    try:
        ray.get(refs, timeout=2 * deadline_s)
    except (ray.exceptions.RayError, RuntimeError) as error:
        for ref in refs:
            ray.cancel(ref, force=True)
        return one_line(error)
    return ""


def all_reduce(meeting_point: str, rank: int, world_size: int, backend: str, deadline_s: float) -> None:
    """On a node: add up ones with the others."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=meeting_point, rank=rank, world_size=world_size, timeout=timedelta(seconds=deadline_s)
    )
    try:
        ones = torch.ones(1024, device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(ones)
        if not bool((ones == world_size).all()):
            raise RuntimeError(f"{world_size} nodes added up to {float(ones.max())}")
    finally:
        dist.destroy_process_group()
