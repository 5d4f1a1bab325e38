"""How new weights get from the trainer to the engines."""

from enum import StrEnum

from pydantic import PositiveFloat, PositiveInt

from roll_core.config.base import Section


class WeightsTransport(StrEnum):
    AUTO = "auto"
    SHARED_GPU = "shared_gpu"
    BROADCAST = "broadcast"
    RAY = "ray"
    STORE = "store"


class WeightsConfig(Section):
    transport: WeightsTransport = WeightsTransport.AUTO
    """shared_gpu: through the memory of a GPU that a trainer rank and an engine are on. broadcast: from trainer rank 0 to
    all engines at once, by NCCL or, on CPUs, gloo. ray: through host memory, by Ray's object store. store: through
    `store.uri`, from where a replaced engine gets its weights without asking the trainer. auto takes shared_gpu where every
    engine is on a trainer's GPU, broadcast where they have GPUs of their own, else ray."""
    full_every: PositiveInt = 10
    """With transport store: of so many versions one is stored whole, the others as what changed since the one before. An
    engine that starts reads the last whole one and every difference since. 1 stores all of them whole."""
    broadcast_seconds: PositiveFloat = 60.0
    """With transport broadcast: an engine that does not join, or takes no part in a bucket, for so long is ended and
    replaced, and this version reaches all engines by ray."""
