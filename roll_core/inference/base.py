"""Protocol of inference engines, and a whole weights update of an engine in one process.

An engine knows neither where weights come from nor what its tokens are used for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from roll_core.config.rollout import InFlightPolicy
from roll_core.inference.requests import Completion, GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.weights.broadcast import Rendezvous
    from roll_core.weights.buckets import Bucket
    from roll_core.weights.checks import WeightsCheck


class InferenceEngine(Protocol):
    """Engine that generates completions and whose weights are replaced while it runs.

    An update is `begin_update`, `load` for every bucket, then `finish_update`.
    """

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one completion. The request waits while no slot is free or an update is under way."""
        ...

    async def abort(self, *request_ids: str) -> None:
        """End requests now. Their completions have the tokens generated so far and end with ABORTED. Unknown ids are
        ignored."""
        ...

    async def begin_update(self, in_flight: InFlightPolicy) -> None:
        """Prepare for new weights. Running requests finish, are aborted, or pause and continue, as `in_flight` says.
        Requests without a slot wait and start with the new weights. A sleeping engine reclaims the memory for its
        weights."""
        ...

    async def join(self, rendezvous: "Rendezvous", rank: int) -> None:
        """Join the broadcast group of a rendezvous, and leave the group joined before.

        The engine's first worker gets `rank`; further workers get the ranks after it.
        """
        ...

    async def load(self, bucket: "Bucket") -> None:
        """Load the tensors of a bucket. On return, the bucket's memory may be reused."""
        ...

    async def finish_update(self, version: int, check: "WeightsCheck | None") -> None:
        """Resume serving, with the loaded weights as `version`.

        Raise WrongWeights if they do not match `check`; the engine then serves no requests until an update succeeds. None
        skips the check, for weights that never left the process.
        """
        ...

    async def sleep(self) -> None:
        """Release accelerator memory, weights included, for a colocated trainer. No request may be in flight. The weights
        may be dropped, since the trainer will publish new ones."""
        ...

    async def wake(self) -> None:
        """Reclaim all memory that `sleep` released and that no update has reclaimed, such as the KV cache. The engine
        generates again once it is awake and an update has brought weights."""
        ...

    async def ping(self) -> None:
        """Return once the process that generates the tokens responds."""
        ...


@dataclass(frozen=True)
class WeightsUpdate:
    """Weights version as a stream of tensors under Hugging Face names, with the check to compare them with."""

    version: int
    tensors: "Iterable[tuple[str, Tensor]]"
    check: "WeightsCheck | None" = None


async def adopt(engine: InferenceEngine, weights: WeightsUpdate, in_flight: InFlightPolicy) -> None:
    """Update an engine's weights from tensors in the same process."""
    from roll_core.weights.buckets import pack

    await engine.begin_update(in_flight)
    for bucket in pack(weights.tensors):
        await engine.load(bucket)
    await engine.finish_update(weights.version, weights.check)
