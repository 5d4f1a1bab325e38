"""What an inference engine must do. An engine never knows where weights come from or what its tokens are for."""

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
    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def abort(self, *request_ids: str) -> None:
        """End requests now; their completions have what was generated and end with ABORTED. Unknown ids are ignored."""
        ...

    async def begin_update(self, in_flight: InFlightPolicy) -> None:
        """Make way for new weights. What is being generated ends or waits, as the policy says; what has no slot yet waits,
        and begins with the new weights. An engine that sleeps takes back as much memory as weights need."""
        ...

    async def join(self, meeting: "Rendezvous", rank: int) -> None:
        """Take part in the broadcasts of a group from now on, as this rank and, where an engine has several workers, the
        next ones; another group, if there was one, is left."""
        ...

    async def load(self, bucket: "Bucket") -> None:
        """Take over some tensors. When it answers, the bucket's memory is used for the next."""
        ...

    async def finish_update(self, version: int, check: "WeightsCheck | None") -> None:
        """Serve again, by these weights. Raises WrongWeights if they are not what the check says, and then serves nobody
        until an update succeeds. Without a check they are taken as they came: for what never left the process."""
        ...

    async def sleep(self) -> None:
        """Give accelerator memory back while a colocated trainer works, that of weights, too: the trainer makes new ones.
        Only with nothing in flight."""
        ...

    async def wake(self) -> None:
        """Take the rest of the memory, once an update has given it weights. It serves when both have happened."""
        ...

    async def answer(self) -> None:
        """Show that somebody is there: whatever generates the tokens, in whichever process it does."""
        ...


@dataclass(frozen=True)
class WeightsUpdate:
    """A numbered policy, tensor by tensor under Hugging Face names."""

    version: int
    tensors: "Iterable[tuple[str, Tensor]]"
    check: "WeightsCheck | None" = None


async def adopt(engine: InferenceEngine, weights: WeightsUpdate, in_flight: InFlightPolicy) -> None:
    """A whole update, for whoever holds weights and engine in one process."""
    from roll_core.weights.buckets import pack

    await engine.begin_update(in_flight)
    for bucket in pack(weights.tensors):
        await engine.load(bucket)
    await engine.finish_update(weights.version, weights.check)
