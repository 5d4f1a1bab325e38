"""Config of the cluster and of the placement of roles on its devices; names of Ray resources that pin roles to nodes.

Trainer and engines are colocated if they have the same devices, disaggregated if they have none in common. If they have some
in common, engines on the trainer's devices sleep while it works and the others keep generating.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import MOST_DEVICES, DeviceList, Section, Unit


class DeviceKind(StrEnum):
    """Kind of device that models run on."""

    CPU = "cpu"
    """CPUs; a device is a slot that roles share."""
    CUDA = "cuda"
    """NVIDIA GPUs; a device is a GPU."""


class SpeedConfig(Section):
    """Peak rates of a device and its links, as vendors state them. `roll plan` and `roll simulate` estimate times from them;
    nothing else reads them. The defaults are an H100 (SXM) in a DGX, with one 400 Gbit/s network card per GPU."""

    teraflops: Annotated[PositiveFloat, Unit("TFLOP/s")] = 989.0
    """Arithmetic rate of a device in dense bfloat16."""
    memory_gb: Annotated[PositiveFloat, Unit("GB/s")] = 3350.0
    """Bandwidth of a device's memory, in GB/s."""
    node_gb: Annotated[PositiveFloat, Unit("GB/s")] = 450.0
    """Bandwidth between devices of a node, each way, in GB/s. 300 for an A100, 25 for cards on PCIe."""
    network_gb: Annotated[PositiveFloat, Unit("GB/s")] = 50.0
    """Bandwidth from a device to other nodes, each way, in GB/s."""


class ClusterConfig(Section):
    """Devices that a leg holds, numbered from 0, node by node."""

    device: DeviceKind = DeviceKind.CPU
    """Kind of device that models run on."""
    nodes: Annotated[PositiveInt, Field(le=MOST_DEVICES), Unit("nodes")] = 1
    """Nodes of a leg."""
    devices_per_node: Annotated[PositiveInt, Field(le=1024), Unit("devices")] = 1
    """GPUs per node; on CPUs, the number of slots that roles share."""
    device_memory_gib: PositiveFloat | None = None
    """Memory of a GPU, in GiB, for the check that a run fits. Null asks the machine where the command runs, if it has a GPU.
    Only with `cluster.device: cuda`."""
    speed: SpeedConfig = SpeedConfig()
    """Peak rates of a device and its links, for time estimates by `roll plan` and `roll simulate`."""
    threads_per_device: Annotated[PositiveInt, Unit("threads")] = 1
    """CPU threads that a role uses for each of its devices."""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """Number of the node that holds a device."""
        return device // self.devices_per_node


LEG_RESOURCE = "roll-leg"
"""Ray resource of nodes that live as long as the leg. Roles that must not be lost are placed on such nodes only."""
ELASTIC_RESOURCE = "roll-elastic"
"""Ray resource of devices on nodes that may disappear at any time."""


def node_resource(node: int) -> str:
    """Name of the Ray resource for the devices of one node. It pins device numbers to nodes; the process that starts Ray on
    the node offers it."""
    return f"roll-node-{node}"


def leg_resources(node: int, devices: int) -> dict[str, int]:
    """Ray resources that a node of the leg offers, with amounts."""
    return {LEG_RESOURCE: 1, node_resource(node): devices}


class PlacementConfig(Section):
    """Devices of each role."""

    trainer: DeviceList = (0,)
    """Devices of the trainer, one rank each: a list, or text like '0-3,8'."""
    engines: DeviceList = (0,)
    """Devices of the engines, one engine per device or per inference.tensor_parallel devices, in the order given. They may
    overlap with placement.trainer."""
    reward_workers: Annotated[PositiveInt, Unit("processes")] = 1
    """Processes that grade completions; they need no device. Raise it if grading is slower than generation."""

    @model_validator(mode="after")
    def _check_devices_are_valid_and_unique(self):
        for key, devices in (("trainer", self.trainer), ("engines", self.engines)):
            if not devices:
                raise ValueError(f"{key} needs at least one device")
            if min(devices) < 0:
                raise ValueError(f"{key} names device {min(devices)}: devices are numbered from 0")
            if len(set(devices)) != len(devices):
                raise ValueError(f"{key} names a device twice: {list(devices)}")
        return self

    @property
    def shared(self) -> frozenset[int]:
        """Devices that hold both a trainer rank and an engine."""
        return frozenset(self.trainer) & frozenset(self.engines)

    @property
    def colocated(self) -> bool:
        """True if trainer and engines have the same devices."""
        return set(self.trainer) == set(self.engines)
