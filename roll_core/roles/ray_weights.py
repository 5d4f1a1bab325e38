"""Numbered weights in Ray's object store: what trainer and engines tell each other through the driver."""

from dataclasses import dataclass

import ray


@dataclass(frozen=True)
class RayWeights:
    """References only: whoever passes it on holds no tensor."""

    version: int
    buckets: tuple[ray.ObjectRef, ...]
    check: ray.ObjectRef
    """What engines compare with, once they have taken the buckets over."""
    digest: str
