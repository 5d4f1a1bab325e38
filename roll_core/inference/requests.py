"""What is asked of an engine and what it answers. Torch-free: the rollout scheduler needs these and no model."""

from dataclasses import dataclass

from roll_core.types.routing import RoutedExperts
from roll_core.types.trajectory import Ending


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample. Its tokens depend on its seed and the weights, not on what else is being generated.

    A completion that was interrupted is asked for again with what it had as `prefix_ids`. The random number of a token
    depends on the seed and on its place in the whole completion, so the same weights give the tokens that would have come.

    Example: GenerationRequest(request_id="17/2", prompt_ids=(6, 2, 4, 33), max_new_tokens=6,
    temperature=1.0, stop_token_ids=(1,), seed=8123, prefix_ids=(2, 4))
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    """Longest completion, the prefix included."""
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    prefix_ids: tuple[int, ...] = ()
    """Tokens of this completion that were generated earlier, perhaps by other weights. The engine goes on after prompt and
    prefix, and answers only what is new."""

    def __post_init__(self):
        have = len(self.prefix_ids)
        assert have < self.max_new_tokens, f"{self.request_id} has all of its {self.max_new_tokens} tokens already: {have}"
        assert not have or self.prefix_ids[-1] not in self.stop_token_ids, f"{self.request_id} ended already, with a stop"

    @property
    def context_ids(self) -> tuple[int, ...]:
        """What the first new token follows."""
        return self.prompt_ids + self.prefix_ids


@dataclass(frozen=True)
class Completion:
    """New tokens (the stop token included, the request's prefix not), the logprob each had under the full distribution at
    the request's temperature (at temperature 1 for greedy requests), and the weights version that produced each.

    Example: Completion(request_id="17/2", token_ids=(2, 4, 6, 1), sampler_logprobs=(-0.1, -0.3, -0.2, -0.01),
    weights_versions=(3, 3, 3, 3), ending=Ending.STOP)
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    weights_versions: tuple[int, ...]
    ending: Ending
    experts: RoutedExperts | None = None
    """Of the request's context and the new tokens, if the engine records them."""
