"""What an inference engine must do. An engine never knows where weights come from or what its tokens are for."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from roll_core.inference.requests import Completion, GenerationRequest


@dataclass(frozen=True)
class WeightsUpdate:
    """A numbered policy, tensor by tensor under Hugging Face names."""

    version: int
    tensors: Iterable[tuple[str, Tensor]]


class InFlight(StrEnum):
    """What happens to requests that are being generated when weights change."""

    FINISH = "finish"
    """They finish with the old weights first; new requests wait."""
    ABORT = "abort"
    """They end now, with the tokens they have."""
    CONTINUE = "continue"
    """They go on with the new weights; each token says which version produced it."""


class InferenceEngine(Protocol):
    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def abort(self, *request_ids: str) -> None:
        """End requests now; their completions have what was generated and end with ABORTED. Unknown ids are ignored."""
        ...

    async def adopt(self, weights: WeightsUpdate, in_flight: InFlight) -> None: ...

    async def sleep(self) -> None:
        """Give accelerator memory back while a colocated trainer works. Only with nothing in flight."""
        ...

    async def wake(self) -> None: ...
