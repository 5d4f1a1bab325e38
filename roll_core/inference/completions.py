"""A completion on its way, as engines with a model hold it."""

import asyncio
from dataclasses import dataclass, field

from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.types.routing import RoutedExperts
from roll_core.types.trajectory import Ending


@dataclass(eq=False)
class InFlightCompletion:
    request: GenerationRequest
    done: asyncio.Future[Completion]
    token_ids: list[int] = field(default_factory=list)
    """New ones: without the request's prefix."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def finish(self, ending: Ending) -> None:
        if not self.done.done():
            self.done.set_result(
                Completion(
                    request_id=self.request.request_id,
                    token_ids=tuple(self.token_ids),
                    sampler_logprobs=tuple(self.logprobs),
                    weights_versions=tuple(self.versions),
                    ending=ending,
                    experts=self.routed_experts(),
                )
            )

    def routed_experts(self) -> RoutedExperts | None:
        """Of the context and the new tokens; engines that record them know."""
        return None


def refuse_what_cannot_be(request: GenerationRequest, max_positions: int, vocabulary: int) -> None:
    """Raise one sentence about a request that no engine could serve: on some, a wrong token would cost all others."""
    for token in request.context_ids:
        if not 0 <= token < vocabulary:
            raise ValueError(f"request {request.request_id} has token {token}, but the model knows 0 to {vocabulary - 1}")
    longest = len(request.prompt_ids) + request.max_new_tokens
    if longest > max_positions:
        raise ValueError(
            f"request {request.request_id} may reach {longest} tokens, but model.max_positions is {max_positions}"
        )
