"""Completions in flight and checks of requests, shared by the engines that have a model."""

import asyncio
from dataclasses import dataclass, field

from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.types.routing import RoutedExperts
from roll_core.types.trajectory import Ending


@dataclass(eq=False)
class InFlightCompletion:
    """Completion that an engine is generating: the request, the tokens so far and the future that gets the result."""

    request: GenerationRequest
    done: asyncio.Future[Completion]
    token_ids: list[int] = field(default_factory=list)
    """New tokens, without the request's prefix."""
    logprobs: list[float] = field(default_factory=list)
    """Sampler logprob of each new token."""
    versions: list[int] = field(default_factory=list)
    """Weights version that produced each new token."""

    def finish(self, ending: Ending) -> None:
        """Resolve the future with the tokens generated so far, unless it is resolved already."""
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
        """Experts of the context and the new tokens. None here; engines that record experts override it."""
        return None


def check_request(request: GenerationRequest, max_positions: int, vocab_size: int) -> None:
    """Raise ValueError if the model cannot serve a request: in some engines an unknown token id would fail all other
    requests, too."""
    for token in request.context_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"request {request.request_id} has token {token}, but the model knows 0 to {vocab_size - 1}")
    longest = len(request.prompt_ids) + request.max_new_tokens
    if longest > max_positions:
        raise ValueError(
            f"request {request.request_id} may reach {longest} tokens, but model.max_positions is {max_positions}"
        )
