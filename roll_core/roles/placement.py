"""From declared devices to Ray resources: one bundle a device, shared equally by the roles placed on it, or one bundle for
the devices that hold an engine together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll_core.config.operations.placement import DeviceKind, node_resource
from roll_core.config.run import RunConfig
from roll_core.errors import DeadlineExceeded


@dataclass(frozen=True)
class ReservedDevices:
    """The devices of a leg, reserved."""

    group: PlacementGroup
    kind: DeviceKind
    shared: frozenset[int]
    """Those that a trainer rank and an engine are on."""
    bundles: tuple[tuple[int, ...], ...]
    """Devices that Ray gives out together."""

    def options(self, devices: Sequence[int]) -> dict[str, Any]:
        """Ray options that put an actor on devices of one bundle."""
        share = sum(0.5 if device in self.shared else 1 for device in devices)
        resources = {"num_cpus": share} if self.kind is DeviceKind.CPU else {"num_cpus": 0, "num_gpus": share}
        (bundle,) = (number for number, bundle in enumerate(self.bundles) if set(devices) <= set(bundle))
        return resources | {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}


def bundles_of(num_devices: int, engines: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The devices of every engine, and all others one by one, in order."""
    of_engines = {device: engine for engine in engines for device in engine}
    return tuple(dict.fromkeys(of_engines.get(device, (device,)) for device in range(num_devices)))


def reserve_devices(config: RunConfig) -> ReservedDevices:
    """Reserve every device a role names, or say that the cluster does not have them."""
    cluster, deadline_s = config.cluster, config.deadlines.start
    resource = "CPU" if cluster.device is DeviceKind.CPU else "GPU"
    bundles = bundles_of(cluster.num_devices, config.engine_devices)
    group = placement_group(
        [{resource: len(devices), node_resource(cluster.node_of(devices[0])): len(devices)} for devices in bundles]
    )
    if not group.wait(deadline_s):  # `ready` would ask by a task, for which a process has to start
        have = int(ray.cluster_resources().get(resource, 0))
        raise DeadlineExceeded(
            f"cluster.devices_per_node x cluster.nodes asks for {cluster.num_devices} {resource} devices; "
            f"Ray found {have} within {deadline_s:.0f} s (deadlines.start)"
        )
    return ReservedDevices(group, cluster.device, config.placement.shared, bundles)
