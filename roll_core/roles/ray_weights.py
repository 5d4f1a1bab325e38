"""Weights versions in Ray's object store, as trainer ranks and engines exchange them through the driver."""

from dataclasses import dataclass

import ray


@dataclass(frozen=True)
class RayWeights:
    """References to a weights version; a process that passes them on holds no tensor."""

    version: int
    buckets: tuple[ray.ObjectRef, ...]
    """References to `WeightsBucket`s."""
    check: ray.ObjectRef
    """Reference to the `WeightsCheck` that engines compare their loaded weights with."""
    digest: str
