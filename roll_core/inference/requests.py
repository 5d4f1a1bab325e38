"""Requests to engines and the completions they return. Torch-free, since the rollout scheduler needs them and no model."""

from dataclasses import dataclass

from roll_core.types.routing import RoutedExperts
from roll_core.types.trajectory import Ending


@dataclass(frozen=True)
class GenerationRequest:
    """Request for one completion. Its tokens depend on its seed and the weights, not on the other requests in the batch.

    An interrupted completion is requested again, with the tokens it has as `prefix_ids`. The random number of a token
    depends on the seed and on its index in the whole completion. With unchanged weights the resumed completion therefore
    equals the uninterrupted one.

    Example: GenerationRequest(request_id="17/2", prompt_ids=(6, 2, 4, 33), max_new_tokens=6,
    temperature=1.0, stop_token_ids=(1,), seed=8123, prefix_ids=(2, 4))
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    """Maximum length of the completion in tokens, including the prefix."""
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    prefix_ids: tuple[int, ...] = ()
    """Tokens of this completion that were generated earlier, perhaps by other weights. Generation continues after prompt
    and prefix; the returned completion has the new tokens only."""

    def __post_init__(self):
        have = len(self.prefix_ids)
        assert have < self.max_new_tokens, f"{self.request_id} has all of its {self.max_new_tokens} tokens already: {have}"
        assert not have or self.prefix_ids[-1] not in self.stop_token_ids, f"{self.request_id} ended already, with a stop"

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Tokens before the first new token: prompt and prefix."""
        return self.prompt_ids + self.prefix_ids


@dataclass(frozen=True)
class Completion:
    """New tokens of a request, each with its sampler logprob and the weights version that produced it.

    Tokens include the stop token and exclude the request's prefix. Logprobs are those of the full distribution at the
    request's temperature, or at temperature 1 for greedy requests.

    Example: Completion(request_id="17/2", token_ids=(2, 4, 6, 1), sampler_logprobs=(-0.1, -0.3, -0.2, -0.01),
    weights_versions=(3, 3, 3, 3), ending=Ending.STOP)
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    weights_versions: tuple[int, ...]
    ending: Ending
    experts: RoutedExperts | None = None
    """Experts of the request's context and the new tokens, if the engine records them."""
