"""Config of the weights transport: how new weights get from the trainer to the engines."""

from enum import StrEnum
from typing import Annotated

from pydantic import PositiveFloat, PositiveInt

from roll_core.config.base import Section, Unit


class WeightsTransport(StrEnum):
    """Path that new weights take from the trainer to the engines."""

    AUTO = "auto"
    """shared_gpu if every engine is on a trainer's GPU, broadcast if engines have GPUs of their own, else ray."""
    SHARED_GPU = "shared_gpu"
    """Memory of the GPU that a trainer rank and an engine share (CUDA IPC)."""
    BROADCAST = "broadcast"
    """Broadcast from trainer rank 0 to all engines at once, by NCCL or, on CPUs, gloo."""
    RAY = "ray"
    """Host memory, through Ray's object store."""
    STORE = "store"
    """Files in store.uri; a replaced engine reads its weights there without the trainer."""


class WeightsConfig(Section):
    """Publishing of new weights to the engines."""

    transport: WeightsTransport = WeightsTransport.AUTO
    """Path that new weights take from the trainer to the engines."""
    full_every: Annotated[PositiveInt, Unit("weights versions")] = 10
    """Weights versions between two that are stored whole; the others are stored as differences to the version before. An
    engine that starts reads the last whole version and every difference since. 1 stores every version whole. Only with
    `weights.transport: store`."""
    broadcast_seconds: PositiveFloat = 60.0
    """Longest wait for an engine to join a broadcast or to receive a bucket, in seconds. Then the engine is ended and
    replaced, and all engines get this version by ray. Only with `weights.transport: broadcast` or `weights.transport: auto`.
    """
