"""What an inference engine must do. An engine never knows where weights come from or what its tokens are for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from roll_core.config.rollout import InFlight
from roll_core.inference.requests import Completion, GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class WeightsSample:
    """Some columns of a tensor, as the trainer has them.

    Example: WeightsSample("model.layers.0.mlp.up_proj.weight", columns=(3, 17), values=<192 x 2>)
    """

    name: str
    columns: tuple[int, ...]
    """Of its last dimension."""
    values: "Tensor"


@dataclass(frozen=True)
class WeightsCheck:
    """What an engine's weights are compared with once it has taken them over."""

    names: tuple[str, ...]
    """Of all tensors."""
    samples: tuple[WeightsSample, ...]


@dataclass(frozen=True)
class WeightsUpdate:
    """A numbered policy, tensor by tensor under Hugging Face names."""

    version: int
    tensors: "Iterable[tuple[str, Tensor]]"
    check: WeightsCheck | None = None
    """None takes the tensors as they come: for what never left the process."""


class InferenceEngine(Protocol):
    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def abort(self, *request_ids: str) -> None:
        """End requests now; their completions have what was generated and end with ABORTED. Unknown ids are ignored."""
        ...

    async def adopt(self, weights: WeightsUpdate, in_flight: InFlight) -> None:
        """Take over new weights. Requests that wait without a slot wait on, and begin with the new ones.

        Raises WeightsMismatch if they are not what the check says, and then serves nobody until it is given others.
        """
        ...

    async def sleep(self) -> None:
        """Give accelerator memory back while a colocated trainer works. Only with nothing in flight."""
        ...

    async def wake(self) -> None: ...
