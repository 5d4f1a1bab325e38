"""Reservation of a leg's devices as Ray resources. Each device is one bundle, shared equally by the roles placed on it; the
devices of a multi-device engine form one bundle."""

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
    """Devices of a leg, reserved as a Ray placement group."""

    group: PlacementGroup
    kind: DeviceKind
    shared: frozenset[int]
    """Devices that hold both a trainer rank and an engine."""
    bundles: tuple[tuple[int, ...], ...]
    """Device numbers of each bundle of the placement group."""

    def options(self, devices: Sequence[int]) -> dict[str, Any]:
        """Ray options that place an actor on devices of one bundle. A shared device counts half."""
        share = sum(0.5 if device in self.shared else 1 for device in devices)
        resources = {"num_cpus": share} if self.kind is DeviceKind.CPU else {"num_cpus": 0, "num_gpus": share}
        (bundle,) = (number for number, bundle in enumerate(self.bundles) if set(devices) <= set(bundle))
        return resources | {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}


def device_bundles(num_devices: int, engines: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the bundles of all devices, in order: the devices of each engine together, every other device alone."""
    engine_of = {device: engine for engine in engines for device in engine}
    return tuple(dict.fromkeys(engine_of.get(device, (device,)) for device in range(num_devices)))


def reserve_devices(config: RunConfig) -> ReservedDevices:
    """Reserve all devices of the cluster; raise DeadlineExceeded if Ray does not find them in time."""
    cluster, deadline_s = config.cluster, config.deadlines.start
    resource = "CPU" if cluster.device is DeviceKind.CPU else "GPU"
    bundles = device_bundles(cluster.num_devices, config.engine_devices)
    group = placement_group(
        [{resource: len(devices), node_resource(cluster.node_of(devices[0])): len(devices)} for devices in bundles]
    )
    if not group.wait(deadline_s):  # `ready` would run a task, which has to start a process
        have = int(ray.cluster_resources().get(resource, 0))
        raise DeadlineExceeded(
            f"cluster.devices_per_node x cluster.nodes asks for {cluster.num_devices} {resource} devices; "
            f"Ray found {have} within {deadline_s:.0f} s (deadlines.start)"
        )
    return ReservedDevices(group, cluster.device, config.placement.shared, bundles)
