"""From declared devices to Ray resources: one bundle a device, shared equally by the roles placed on it."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll_core.config.placement import ClusterConfig, DeviceKind, PlacementConfig
from roll_core.errors import DeadlineExceeded


@dataclass(frozen=True)
class Devices:
    """The devices of a leg, reserved."""

    group: PlacementGroup
    kind: DeviceKind
    shared: frozenset[int]
    """Those that a trainer rank and an engine are on."""

    def options(self, device: int) -> dict[str, Any]:
        """Ray options that put an actor on a device."""
        share = 0.5 if device in self.shared else 1
        resources = {"num_cpus": share} if self.kind is DeviceKind.CPU else {"num_cpus": 0, "num_gpus": share}
        return resources | {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, device)}


def reserve_devices(cluster: ClusterConfig, placement: PlacementConfig, deadline_s: float) -> Devices:
    """Reserve every device a role names, or say that the cluster does not have them."""
    resource = "CPU" if cluster.device is DeviceKind.CPU else "GPU"
    group = placement_group([{resource: 1}] * cluster.num_devices, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=deadline_s)
    except ray.exceptions.GetTimeoutError:
        have = int(ray.cluster_resources().get(resource, 0))
        raise DeadlineExceeded(
            f"cluster.devices_per_node x cluster.nodes asks for {cluster.num_devices} {resource} devices; "
            f"Ray found {have} within {deadline_s:.0f} s (deadlines.start)"
        ) from None
    return Devices(group, cluster.device, placement.shared)
