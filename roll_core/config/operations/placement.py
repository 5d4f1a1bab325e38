"""Which role runs on which devices. The same devices: colocated. Disjoint devices: disaggregated. Some in common: engines on
the trainer's devices sleep while it works, the others generate on."""

from enum import StrEnum

from pydantic import PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import DeviceList, Section


class DeviceKind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class SpeedConfig(Section):
    """What a device and its ways to others are capable of, as their makers state it; `roll plan` estimates times by it, and
    nothing else reads it. The defaults are an H100 (SXM) in a DGX: one network card of 400 Gbit/s to a GPU."""

    teraflops: PositiveFloat = 989.0
    """Dense bfloat16."""
    memory_gb: PositiveFloat = 3350.0
    """Read from a device's memory, in GB/s."""
    node_gb: PositiveFloat = 450.0
    """From a device to others of its node, each way, in GB/s. 300 for an A100, 25 for cards on PCIe."""
    network_gb: PositiveFloat = 50.0
    """From a device to those of other nodes, each way, in GB/s."""


class ClusterConfig(Section):
    """The devices a leg holds, numbered node by node from 0."""

    device: DeviceKind = DeviceKind.CPU
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 1
    """Accelerators per node; on CPU, the number of slots the roles share."""
    device_memory_gib: PositiveFloat | None = None
    """Memory of a GPU. Null asks the machine that the run is started on, where there is one."""
    speed: SpeedConfig = SpeedConfig()
    threads_per_device: PositiveInt = 1
    """CPU threads a role uses for each of its devices."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        return device // self.devices_per_node


LEG_RESOURCE = "roll-leg"
"""What Ray calls a node that lives as long as the leg: roles go nowhere else that cannot do without theirs."""
ELASTIC_RESOURCE = "roll-elastic"
"""What Ray calls the devices of a node that may go at any time."""


def node_resource(node: int) -> str:
    """What Ray calls the devices of one node, so that each is where its number says. Whoever starts Ray there offers it."""
    return f"roll-node-{node}"


def leg_resources(node: int, devices: int) -> dict[str, int]:
    """What Ray is told that a node of the leg offers."""
    return {LEG_RESOURCE: 1, node_resource(node): devices}


class PlacementConfig(Section):
    trainer: DeviceList = (0,)
    """One trainer rank per device."""
    engines: DeviceList = (0,)
    """One inference engine per device, or per inference.tensor_parallel devices, in the order they are named."""
    reward_workers: PositiveInt = 1
    """Processes that grade; they need no device."""

    @model_validator(mode="after")
    def _each_device_once(self):
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
        """Devices of the trainer that engines are on, too."""
        return frozenset(self.trainer) & frozenset(self.engines)

    @property
    def colocated(self) -> bool:
        return set(self.trainer) == set(self.engines)
