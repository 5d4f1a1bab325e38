"""A completion on its way, as engines with a model hold it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

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


def check_request(request: GenerationRequest, max_positions: int, vocabulary: int) -> None:
    """Raise one sentence about a request that no engine could serve: on some, a wrong token would cost all others."""
    for token in request.context_ids:
        if not 0 <= token < vocabulary:
            raise ValueError(f"request {request.request_id} has token {token}, but the model knows 0 to {vocabulary - 1}")
    longest = len(request.prompt_ids) + request.max_new_tokens
    if longest > max_positions:
        raise ValueError(
            f"request {request.request_id} may reach {longest} tokens, but model.max_positions is {max_positions}"
        )


async def as_they_finish(generating: Iterable[Coroutine[Any, Any, Completion]]) -> AsyncIterator[list[Completion]]:
    """Those that finished together in one list."""
    finished: asyncio.Queue[asyncio.Task[Completion]] = asyncio.Queue()
    tasks = [asyncio.create_task(one) for one in generating]
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    left = len(tasks)
    while left:
        together = [await finished.get()]
        while not finished.empty():
            together.append(finished.get_nowait())
        left -= len(together)
        yield [task.result() for task in together]
